"""`amem extend`: add context to an agent without generating, for example to hand results to its next phase."""

from typing import Annotated

import typer

from amem_cli import turns
from amem_cli.shell import signals
from amem_cli.shell.inputs import prefill_text
from amem_cli.shell.options import (
    DEFAULT_WAIT,
    AgentName,
    Call,
    Expect,
    ModelName,
    Raw,
    Role,
    TextFiles,
    Wait,
    command,
    new_app,
)
from kvstore.errors import UsageError
from kvstore.naming import check_name

app = new_app()

Phase = Annotated[str | None, typer.Option("--phase", metavar="LABEL", help="Label of the added turn.")]


@command(app)
def extend(
    call: Call,
    agent: AgentName,
    files: TextFiles = None,
    role: Role = "user",
    raw: Raw = False,
    phase: Phase = None,
    expect: Expect = None,
    wait: Wait = DEFAULT_WAIT,
    model: ModelName = None,
) -> None:
    """Add text to an agent's context: FILEs joined as `cat` joins them, or standard input."""
    check_name("agent", agent)
    if phase is not None:
        check_name("phase", phase)
    text = prefill_text(files or [])
    if not text:
        raise UsageError("the prompt is empty", "give FILE or standard input")
    store = call.open_store()
    entry = turns.choose_model(call, model, store, store.agent(agent))
    engine = turns.load_engine(call, store, entry)
    from amem_cli.engine.prompt.transcript import Text
    from amem_cli.engine.turns.requests import ExtendOptions

    with signals.listening() as stop, call.out.progress("extend") as bar:
        texts = [Text(text, role=role, label=phase, raw=raw)]
        turn = engine.extend(agent, texts, ExtendOptions(expect, wait), turns.watcher_of(bar, stop))
    if not turn.changed:
        call.out.warn(f"extend was interrupted; {turn.agent} is unchanged")
    turns.print_summary(call.out, turn)
    call.out.result(call.command, turn.agent, ok=not stop(), **turns.json_fields(turn))
    stop.finish()
