"""`amem extend`: add context to an agent without generating, as one phase of work hands it to the next."""

from typing import Annotated, Literal

import typer

from amem_cli import turns
from amem_cli.shell import signals
from amem_cli.shell.inputs import prefill_text
from amem_cli.shell.options import DEFAULT_WAIT, Call, Expect, ModelName, Wait, command, new_app
from kvstore.errors import UsageError
from kvstore.naming import check_name

app = new_app()


@command(app)
def extend(
    call: Call,
    agent: Annotated[str, typer.Argument(metavar="AGENT", help="The agent's name.")],
    files: Annotated[list[str] | None, typer.Argument(metavar="FILE", help="Text; - is standard input.")] = None,
    role: Annotated[Literal["user", "assistant"], typer.Option("--role", help="Whose text it is.")] = "user",
    raw: Annotated[bool, typer.Option("--raw", help="Add no template; control tokens in the text count.")] = False,
    phase: Annotated[str | None, typer.Option("--phase", metavar="LABEL", help="The phase that it belongs to.")] = None,
    expect: Expect = None,
    wait: Wait = DEFAULT_WAIT,
    model: ModelName = None,
) -> None:
    """Add text to an agent's context. Files join as `cat` joins them; without one, standard input is read."""
    check_name("agent", agent)
    if phase is not None:
        check_name("phase", phase)
    text = prefill_text(files or [])
    if not text:
        raise UsageError("the prompt is empty", "give FILE, or text on standard input")
    store = call.open_store()
    entry = turns.choose_model(call, model, store, store.agent(agent))
    engine = turns.load_engine(call, store, entry)
    from amem_cli.engine.prompt.transcript import Text
    from amem_cli.engine.turns.requests import ExtendOptions, Watcher

    with signals.listening() as stop, call.out.progress("extend") as bar:
        watcher = Watcher(on_progress=lambda at: bar.update(at.done, at.total, at.tokens_per_second), should_stop=stop)
        turn = engine.extend(agent, [Text(text, role=role, label=phase, raw=raw)], ExtendOptions(expect, wait), watcher)
    if not turn.changed:
        call.out.warn(f"the extension of {turn.agent} was stopped: it is as it was")
    turns.tell(call.out, turn)
    call.out.result(call.command, turn.agent, ok=not stop(), **turns.fields(turn))
    stop.finish()
