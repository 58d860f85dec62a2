"""`amem snapshot`: name a state of an agent. No block is copied, and no agent is waited for."""

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
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Its name; made up if left out.")] = None,
    note: Note = None,
) -> None:
    """Name a state of an agent, so that it is kept and can be gone back to."""
    from kvstore import lifecycle

    state = parse_ref(ref)
    if name is not None:
        check_name("snapshot", name)
    made, is_new = lifecycle.snapshot(call.open_store(), state, name, note)
    named = f"{made.agent}@{made.name}"
    if not is_new:
        call.out.say(f"{named} names that state already")
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
