"""`amem prefill`: build an agent's cache from text, so that its first answer needs no prefill."""

from typing import Annotated

import typer

from amem_cli import turns
from amem_cli.shell import signals
from amem_cli.shell.inputs import check_text, drop_newline, prefill_text, read_text
from amem_cli.shell.options import (
    DEFAULT_WAIT,
    AgentName,
    Call,
    ModelName,
    Raw,
    Role,
    TextFiles,
    Wait,
    command,
    new_app,
)
from kvstore.errors import UsageError
from kvstore.format.codecs import CODECS
from kvstore.naming import check_name

app = new_app()

System = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System text.")]
SystemFile = Annotated[str | None, typer.Option("--system-file", metavar="FILE", help="File with the system text.")]
DomainName = Annotated[str | None, typer.Option("--domain", metavar="D", help="Share blocks within this domain.")]
Replace = Annotated[bool, typer.Option("--replace", help="Replace the agent's text if it differs.")]
CodecName = Annotated[str | None, typer.Option("--codec", metavar="CODEC", help="How the cache is quantized.")]


@command(app)
def prefill(
    call: Call,
    agent: AgentName,
    files: TextFiles = None,
    model: ModelName = None,
    system: System = None,
    system_file: SystemFile = None,
    role: Role = "user",
    raw: Raw = False,
    domain: DomainName = None,
    replace: Replace = False,
    codec: CodecName = None,
    wait: Wait = DEFAULT_WAIT,
) -> None:
    """Build an agent's cache from text: FILEs joined as `cat` joins them, or standard input."""
    _check(agent, domain, codec)
    system_text, text = _texts(system, system_file, files or [])
    store = call.open_store() if call.layout.format.exists() else None
    entry = turns.choose_model(call, model, store, turns.find_agent(store, agent))
    engine = turns.load_engine(call, store or call.create_store(), entry)
    from amem_cli.engine.prompt.transcript import Text
    from amem_cli.engine.turns.requests import PrefillOptions

    with signals.listening() as stop, call.out.progress("prefill") as bar:
        turn = engine.prefill(
            agent,
            [Text(text, role=role, raw=raw)] if text else [],
            PrefillOptions(system_text, domain, replace, codec, wait),
            turns.watcher_of(bar, stop),
        )
    if not turn.changed:
        call.out.info(f"{turn.agent} already has this text; nothing changed")
    if not turn.complete:
        call.out.warn(f"prefill of {turn.agent} was interrupted; run the same command to continue it")
    turns.print_summary(call.out, turn)
    call.out.result(call.command, turn.agent, ok=not stop(), **turns.json_fields(turn))
    stop.finish()


def _check(agent: str, domain: str | None, codec: str | None) -> None:
    """Raise UsageError for a name that is not valid, or a codec that does not exist."""
    check_name("agent", agent)
    if domain is not None:
        check_name("domain", domain)
    if codec is not None and codec not in CODECS:
        raise UsageError(f"unknown codec {codec!r}", f"the codecs are {', '.join(CODECS)}")


def _texts(system: str | None, system_file: str | None, files: list[str]) -> tuple[str | None, str]:
    """The system text and the text. Raises UsageError if both are empty, and as `read_text` does."""
    system_text, text = _system_text(system, system_file), prefill_text(files)
    if not (text or system_text):
        raise UsageError("the prompt is empty", "give FILE, --system TEXT or standard input")
    return system_text, text


def _system_text(text: str | None, file: str | None) -> str | None:
    """The system text, from one of its two options. Raises UsageError if both are given, and as `read_text` does."""
    if text is not None and file is not None:
        raise UsageError("--system and --system-file cannot be combined", "give one of them")
    if file is not None:
        return drop_newline(read_text(file))
    return check_text(text, "the system text") if text is not None else None
