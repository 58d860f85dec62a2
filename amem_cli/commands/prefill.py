"""`amem prefill`: build an agent's cache from text, so that its first answer needs no prefill."""

from typing import Annotated, Literal

import typer

from amem_cli import turns
from amem_cli.shell import signals
from amem_cli.shell.inputs import check_text, drop_newline, prefill_text, read_text
from amem_cli.shell.options import DEFAULT_WAIT, Call, ModelName, Wait, command, new_app
from kvstore.errors import UsageError
from kvstore.format.codecs import CODECS
from kvstore.naming import check_name

app = new_app()


@command(app)
def prefill(
    call: Call,
    agent: Annotated[str, typer.Argument(metavar="AGENT", help="The agent's name.")],
    files: Annotated[list[str] | None, typer.Argument(metavar="FILE", help="Text; - is standard input.")] = None,
    model: ModelName = None,
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="The system text.")] = None,
    system_file: Annotated[
        str | None, typer.Option("--system-file", metavar="FILE", help="A file with the system text.")
    ] = None,
    role: Annotated[Literal["user", "assistant"], typer.Option("--role", help="Whose text it is.")] = "user",
    raw: Annotated[bool, typer.Option("--raw", help="Add no template; control tokens in the text count.")] = False,
    domain: Annotated[
        str | None, typer.Option("--domain", metavar="D", help="Share blocks with this domain's agents.")
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Let the text take the place of another.")] = False,
    codec: Annotated[str | None, typer.Option("--codec", metavar="CODEC", help="How the cache is packed.")] = None,
    wait: Wait = DEFAULT_WAIT,
) -> None:
    """Build an agent's cache from text. Files join as `cat` joins them; without one, standard input is read."""
    check_name("agent", agent)
    if domain is not None:
        check_name("domain", domain)
    if codec is not None and codec not in CODECS:
        raise UsageError(f"there is no codec {codec!r}", f"the codecs are {', '.join(CODECS)}")
    system_text = _system_text(system, system_file)
    text = prefill_text(files or [])
    if not (text or system_text):
        raise UsageError("the prompt is empty", "give FILE, --system TEXT, or text on standard input")

    store = call.open_store() if call.layout.format.exists() else None
    entry = turns.choose_model(call, model, store, turns.find_agent(store, agent))
    engine = turns.load_engine(call, store or call.create_store(), entry)
    from amem_cli.engine.prompt.transcript import Text
    from amem_cli.engine.turns.requests import PrefillOptions, Watcher

    with signals.listening() as stop, call.out.progress("prefill") as bar:
        turn = engine.prefill(
            agent,
            [Text(text, role=role, raw=raw)] if text else [],
            PrefillOptions(system_text, domain, replace, codec, wait),
            Watcher(on_progress=lambda at: bar.update(at.done, at.total, at.tokens_per_second), should_stop=stop),
        )
    if not turn.changed:
        call.out.say(f"{turn.agent} holds that text already")
    if not turn.complete:
        call.out.warn(f"the prefill of {turn.agent} was cut short: the same command goes on with it")
    turns.tell(call.out, turn)
    call.out.result(call.command, turn.agent, ok=not stop(), **turns.fields(turn))
    stop.finish()


def _system_text(text: str | None, file: str | None) -> str | None:
    if text is not None and file is not None:
        raise UsageError("there are two system texts", "give --system or --system-file")
    if file is not None:
        return drop_newline(read_text(file))
    return check_text(text, "the system text") if text is not None else None
