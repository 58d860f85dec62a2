"""`amem demo`: what amem does, on a real model and with the real commands, each in a process of its own.

A text is prefilled once. Independent processes then answer from the state on disk, and forks share it. Every figure
is measured in this run, except for the size of a float16 cache, which is computed.
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

# The model is not trained to chat: it continues a text, so a question is the start of a sentence.
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

    `cold_ttft_ms` is the wait of the first question: the prefill of the text, and its own first token.
    """

    model: str
    tokens: int
    cold_ttft_ms: float
    warm_ttft_ms: float
    agent_bytes: int
    agent_fp16_bytes: int
    fork_bytes: int  # of one fork, before its first turn
    spoken_fork_bytes: int  # of the larger fork, after one turn
    bytes: int  # of all agents
    fp16_bytes: int
    checked_files: int
    checked_bytes: int


Directory = Annotated[
    Path | None,
    typer.Option("--dir", metavar="DIR", envvar="AMEM_DIR", help="Work in DIR and keep it, not in a temporary folder."),
]
Tokens = Annotated[int, typer.Option("--tokens", metavar="N", min=300, max=30_000, help="Approximate text length.")]


@command(app)
def demo(call: Call, directory: Directory = None, tokens: Tokens = handbook.TOKENS) -> None:
    """Show in two minutes what amem does, with Gemma 3 270M on a store of its own."""
    from amem_cli.demo.runner import Runner
    from amem_cli.engine.models import registry

    registry.find(call.layout, registry.DEMO)  # before anything is created
    with signals.listening() as stop:
        try:
            with _folder(directory) as folder:
                runner = Runner(folder, folder / "store", call.out, stop)
                figures = _Tour(call, runner).run(registry.DEMO, tokens)
        finally:
            stop.finish()
    _show_figures(call, figures)
    if directory:
        call.out.info(f"\nexplore the store: amem --store {shlex.quote(str(directory / 'store'))} inspect")
    call.out.result(call.command, **asdict(figures))


@contextmanager
def _folder(chosen: Path | None) -> Iterator[Path]:
    """The folder to work in: a new or empty one, which is kept, or a temporary one."""
    from kvstore.disk import files

    if chosen is None:
        with tempfile.TemporaryDirectory(prefix="amem-demo-") as temporary:
            yield Path(temporary)
        return
    folder = chosen.absolute()
    files.make_dirs(folder)
    if any(folder.iterdir()):
        raise ConflictError(f"{folder} is not empty", "give a new or empty folder")
    yield folder


@dataclass(frozen=True)
class _Tour:
    """Runs the commands of the demo, and shows what they did."""

    call: Call
    runner: "Runner"

    def run(self, model: str, tokens: int) -> DemoFigures:
        """All steps, with a text of about `tokens` tokens."""
        from kvstore.store import Store

        read = self._prefill(model, tokens)
        first = self._ask("\n2. Another process asks. It reads no text.\n", "reader", _PLACE)
        warm = self._ask("\n3. A third one asks. Nothing stayed in memory.\n", "reader", _SKIPPER)
        silent = self._fork()
        self._ask("\n5. The forks diverge.\n", "history", _BOY)
        self._ask("", "rules", _ANCHOR)
        spoken = self._inspect()
        store = Store.open(self.runner.store, self.call.actor())
        checked = self._verify()
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

    def _prefill(self, model: str, tokens: int) -> dict[str, Any]:
        from kvstore.disk import files

        text = handbook.handbook(tokens).encode()
        files.write_new(self.runner.folder / handbook.FILE_NAME, [text])
        self.call.out.print("1. An agent reads a text; its state goes to disk.\n")
        read = self.runner.run("prefill", "reader", handbook.FILE_NAME, "--model", model, live=True).result
        written = human_size(read["bytes_written"])
        self.call.out.print(f"   {read['tokens']} tokens in {read['seconds']:.1f} s, {written} written")
        return read

    def _ask(self, title: str, agent: str, beginning: str) -> dict[str, Any]:
        """Let an agent complete a sentence."""
        if title:
            self.call.out.print(title)
        ran = self.runner.run("chat", agent, beginning, *_LIMITS)
        answer = ran.result
        self.call.out.print(answer["text"])
        self.call.out.print(f"   process {ran.pid}: first token after {_time(answer['ttft_ms'])}")
        self.call.out.print(f"   {answer['reused']} tokens from disk, {answer['prefilled']} prefilled")
        return answer

    def _fork(self) -> "Ran":
        """Name the state of the agent and fork it; what `inspect` shows then."""
        self.call.out.print("\n4. Name that state; continue it as two agents.\n")
        self.runner.run("snapshot", "reader", "asked")
        for name in _FORKS:
            self.runner.run("fork", "reader@asked", name)
        return self._inspect()

    def _inspect(self) -> "Ran":
        """Run `inspect`, and show what the agents share."""
        ran = self.runner.run("inspect")
        rows = [
            (name, str(agent["tokens"]), *(human_size(agent[key]) for key in ("bytes", "shared_bytes", "own_bytes")))
            for name, agent in _agents(ran).items()
        ]
        self.call.out.table(("AGENT", "TOKENS", "SIZE", "SHARED", "OWN"), rows, right=range(1, 5))
        return ran

    def _verify(self) -> dict[str, Any]:
        self.call.out.print("\n6. Check every file against its SHA-256.\n")
        checked = self.runner.run("verify", "--deep").result
        self.call.out.print(f"   {checked['checked']} files, {human_size(checked['bytes'])}: all intact")
        return checked


def _agents(inspected: "Ran") -> dict[str, dict[str, Any]]:
    return {line["name"]: line for line in inspected.lines if line["type"] == "agent"}


def _fp16_bytes(store: "Store", agent: str) -> int:
    """The size of an agent's cached tokens in float16."""
    from amem_cli.views.disk_usage import group_usage

    manifest = store.resolve(Ref(agent)).manifest
    return sum(group_usage(manifest, group).fp16_bytes for group in manifest.groups)


def _show_figures(call: Call, figures: DemoFigures) -> None:
    """Compare with no store, where every process prefills the text and keeps a float16 cache of its own."""
    fp16, size = figures.agent_fp16_bytes, human_size
    rows = [
        _row("first token", figures.cold_ttft_ms, figures.warm_ttft_ms, _time),
        _row("one agent", fp16, figures.agent_bytes, size),
        _row("all three agents", figures.fp16_bytes, figures.bytes, size),
        _row("a fork", fp16, figures.fork_bytes, size),
        _row("a fork after a turn", fp16, figures.spoken_fork_bytes, size),
    ]
    call.out.print("")
    call.out.table(("", "COLD, FP16", "AMEM", "RATIO"), rows, right=range(1, 4))


def _row(name: str, cold: Number, warm: Number, show: Callable[[Number], str]) -> tuple[str, ...]:
    ratio = cold / warm
    return name, show(cold), show(warm), f"{ratio:,.{0 if ratio >= 10 else 1}f}"


def _time(milliseconds: float) -> str:
    return f"{milliseconds / 1000:.2f} s"
