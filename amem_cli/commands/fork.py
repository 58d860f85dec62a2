"""`amem fork`: continue a state under another name. The two agents share their blocks until they part."""

from typing import Annotated

import typer

from amem_cli.shell.options import Call, Note, State, command, new_app
from amem_cli.shell.output import digest
from kvstore.naming import check_name, parse_ref

app = new_app()


@command(app)
def fork(
    call: Call,
    ref: State,
    new: Annotated[str, typer.Argument(metavar="NEW", help="The new agent's name.")],
    note: Note = None,
) -> None:
    """Continue a state under another name; no block is copied."""
    from kvstore import lifecycle

    source = parse_ref(ref)
    check_name("agent", new)
    made = lifecycle.fork(call.open_store(), source, new, note)
    call.out.result(
        call.command,
        new,
        agent=made.agent.name,
        source=str(source),
        manifest=digest(made.digest),
        tokens=made.manifest.tokens,
        complete=made.manifest.complete,
    )
