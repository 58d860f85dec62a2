"""`amem snapshot`: name a state of an agent. It copies no block and waits for no agent."""

from typing import Annotated

import typer

from amem_cli.shell.options import Call, Note, State, command, new_app
from amem_cli.shell.output import digest
from kvstore.naming import check_name, parse_ref

app = new_app()


@command(app)
def snapshot(
    call: Call,
    ref: State,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Its name; generated if omitted.")] = None,
    note: Note = None,
) -> None:
    """Name a state of an agent, so that it is kept and can be restored."""
    from kvstore import lifecycle

    state = parse_ref(ref)
    if name is not None:
        check_name("snapshot", name)
    made, is_new = lifecycle.snapshot(call.open_store(), state, name, note)
    named = f"{made.agent}@{made.name}"
    if not is_new:
        call.out.info(f"{named} already names that state")
    call.out.result(
        call.command,
        named,
        ref=named,
        agent=made.agent,
        name=made.name,
        manifest=digest(made.manifest),
        note=made.note,
        is_new=is_new,
    )
