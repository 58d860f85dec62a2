"""`amem fork`: continue a state as a new agent. The two agents share blocks until they diverge."""

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
    new: Annotated[str, typer.Argument(metavar="NEW", help="Name of the new agent.")],
    note: Note = None,
) -> None:
    """Continue a state as a new agent; no block is copied."""
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
