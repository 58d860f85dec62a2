"""`amem demo`: the main job on a real model, by the real commands, each in a process of its own.

A text is prefilled once. Processes that know nothing of each other then answer from what is on disk, and forks share
it. Every figure is measured in this run, but for the size of a float16 cache, which is computed.
"""

import shlex
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from amem_cli.demo import handbook
from amem_cli.shell import signals
from amem_cli.shell.options import Call, command, new_app
from amem_cli.shell.output import human_size
from kvstore.errors import ConflictError
from kvstore.naming import Ref

if TYPE_CHECKING:
    from amem_cli.demo.runner import Ran, Runner
    from kvstore.store import Store

app = new_app()

# The model was never taught to converse: it goes on with a text, so a question is the beginning of a sentence.
_PLACE = " The Tamsin lies at anchor on the"
_SKIPPER = " The skipper of the supply boat is called"
_BOY = " The boy who rowed out to the Tamsin was called"
_ANCHOR = " When the anchor drags, the keeper of the watch wakes"
_LIMITS = ("--stop", ".", "--max-tokens", "24")
_FORKS = ("history", "rules")

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class DemoFigures:
    """What the demo measured. Times are milliseconds with the model loaded, sizes are bytes on disk.

    `cold_ttft_ms` is what the first question waited for: the prefill of the text, and its own first token.
    """

    model: str
    tokens: int
    cold_ttft_ms: float
    warm_ttft_ms: float
    agent_bytes: int
    agent_fp16_bytes: int
    fork_bytes: int  # of one fork, before it says anything
    spoken_fork_bytes: int  # of the larger fork after one turn
    bytes: int  # of all agents
    fp16_bytes: int
    checked_files: int
    checked_bytes: int


@command(app)
def demo(
    call: Call,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir", metavar="DIR", envvar="AMEM_DIR", help="Work in DIR and keep it; else in a temporary folder."
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option("--tokens", metavar="N", min=300, max=30_000, help="About how long the text is.")
    ] = handbook.TOKENS,
) -> None:
    """Show in two minutes what amem does, with Gemma 3 270M on a store of its own."""
    from amem_cli.demo.runner import Runner
    from amem_cli.engine.models import registry

    registry.find(call.layout, registry.DEMO)  # before anything is made
    with signals.listening() as stop:
        try:
            with _folder(directory) as folder:
                runner = Runner(folder, folder / "store", call.out, stop)
                figures = _tour(call, runner, registry.DEMO, tokens)
        finally:
            stop.finish()
    _show_figures(call, figures)
    if directory:
        call.out.say(f"\nlook around: amem --store {shlex.quote(str(directory / 'store'))} inspect")
    call.out.result(call.command, **asdict(figures))


@contextmanager
def _folder(chosen: Path | None) -> Iterator[Path]:
    """The folder to work in: an empty or new one, which stays, or a temporary one."""
    from kvstore.disk import files

    if chosen is None:
        with tempfile.TemporaryDirectory(prefix="amem-demo-") as temporary:
            yield Path(temporary)
        return
    folder = chosen.absolute()
    files.make_dirs(folder)
    if any(folder.iterdir()):
        raise ConflictError(f"{folder} is not empty", "give the demo an empty folder, or one that is not there yet")
    yield folder


def _tour(call: Call, runner: "Runner", model: str, tokens: int) -> DemoFigures:
    """Run the commands, and show what they did."""
    from kvstore.disk import files
    from kvstore.store import Store

    say = call.out.print
    files.write_new(runner.folder / handbook.FILE_NAME, [handbook.handbook(tokens).encode()])
    say("1. An agent reads a text; its state goes to disk.\n")
    read = runner.run("prefill", "reader", handbook.FILE_NAME, "--model", model, live=True).result
    say(f"   {read['tokens']} tokens in {read['seconds']:.1f} s, {human_size(read['bytes_written'])} written")

    say("\n2. Another process asks. It reads no text.\n")
    first = _ask(call, runner, "reader", _PLACE)
    say("\n3. A third one asks. Nothing stayed in memory.\n")
    warm = _ask(call, runner, "reader", _SKIPPER)

    say("\n4. Name that state; continue it as two agents.\n")
    runner.run("snapshot", "reader", "asked")
    for name in _FORKS:
        runner.run("fork", "reader@asked", name)
    silent = _inspect(call, runner)
    say("\n5. Each of them goes its own way.\n")
    _ask(call, runner, "history", _BOY)
    _ask(call, runner, "rules", _ANCHOR)
    spoken = _inspect(call, runner)

    say("\n6. Read every file; hold it against its SHA-256.\n")
    store = Store.open(runner.store, call.actor())
    checked = runner.run("verify", "--deep").result
    say(f"   {checked['checked']} files, {human_size(checked['bytes'])}: all of them whole")
    return DemoFigures(
        model=model,
        tokens=read["tokens"],
        cold_ttft_ms=read["seconds"] * 1000 + first["ttft_ms"],
        warm_ttft_ms=warm["ttft_ms"],
        agent_bytes=_agents(spoken)["reader"]["bytes"],
        agent_fp16_bytes=_fp16_bytes(store, "reader"),
        fork_bytes=max(_agents(silent)[name]["own_bytes"] for name in _FORKS),
        spoken_fork_bytes=max(_agents(spoken)[name]["own_bytes"] for name in _FORKS),
        bytes=spoken.result["bytes"],
        fp16_bytes=sum(_fp16_bytes(store, name) for name in _agents(spoken)),
        checked_files=checked["checked"],
        checked_bytes=checked["bytes"],
    )


def _ask(call: Call, runner: "Runner", agent: str, beginning: str) -> dict[str, Any]:
    """Let an agent complete a sentence."""
    ran = runner.run("chat", agent, beginning, *_LIMITS)
    answer = ran.result
    call.out.print(answer["text"])
    call.out.print(f"   process {ran.pid}: first token after {_time(answer['ttft_ms'])}")
    call.out.print(f"   {answer['reused']} tokens from disk, {answer['prefilled']} prefilled")
    return answer


def _inspect(call: Call, runner: "Runner") -> "Ran":
    """Run `inspect`, and show what of the agents is shared."""
    ran = runner.run("inspect")
    rows = [
        (name, str(agent["tokens"]), *(human_size(agent[key]) for key in ("bytes", "shared_bytes", "own_bytes")))
        for name, agent in _agents(ran).items()
    ]
    call.out.table(("AGENT", "TOKENS", "SIZE", "SHARED", "OWN"), rows, right=range(1, 5))
    return ran


def _agents(inspected: "Ran") -> dict[str, dict[str, Any]]:
    return {line["name"]: line for line in inspected.lines if line["type"] == "agent"}


def _fp16_bytes(store: "Store", agent: str) -> int:
    """What an agent's cached tokens would take in float16."""
    from amem_cli.views.usage import group_usage

    manifest = store.resolve(Ref(agent)).manifest
    return sum(group_usage(manifest, group).fp16_bytes for group in manifest.groups)


def _show_figures(call: Call, figures: DemoFigures) -> None:
    """Without a store every process prefills the text, and keeps a float16 cache of its own."""
    fp16, size = figures.agent_fp16_bytes, human_size
    rows = [
        _row("first token", figures.cold_ttft_ms, figures.warm_ttft_ms, _time),
        _row("one agent", fp16, figures.agent_bytes, size),
        _row("all three agents", figures.fp16_bytes, figures.bytes, size),
        _row("a fork", fp16, figures.fork_bytes, size),
        _row("a fork, a turn on", fp16, figures.spoken_fork_bytes, size),
    ]
    call.out.print("")
    call.out.table(("", "COLD, FP16", "AMEM", "RATIO"), rows, right=range(1, 4))


def _row(name: str, cold: Number, warm: Number, show: Callable[[Number], str]) -> tuple[str, ...]:
    ratio = cold / warm
    return name, show(cold), show(warm), f"{ratio:,.{0 if ratio >= 10 else 1}f}"


def _time(milliseconds: float) -> str:
    return f"{milliseconds / 1000:.2f} s"
