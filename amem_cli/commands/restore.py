"""`amem restore`: move an agent's head to one of its states. The old head stays in the history."""

from amem_cli.shell.options import DEFAULT_WAIT, Call, Expect, Note, State, Wait, command, new_app
from amem_cli.shell.output import digest
from kvstore.naming import parse_ref

app = new_app()


@command(app)
def restore(call: Call, ref: State, expect: Expect = None, wait: Wait = DEFAULT_WAIT, note: Note = None) -> None:
    """Move an agent's head to a state, and show the command that undoes it."""
    from kvstore import lifecycle

    state = parse_ref(ref)
    done = lifecycle.restore(call.open_store(), state, wait, expect, note)
    undo = f"amem restore {done.undo}" if done.undo else None
    if undo:
        call.out.info(f"{state.agent} moved from {digest(done.before)} to {digest(done.after)}")
        call.out.info(f"undo: {undo}")
    else:
        call.out.info(f"{state.agent} is already at that state")
    call.out.result(
        call.command,
        state.agent,
        agent=state.agent,
        before=digest(done.before),
        after=digest(done.after),
        undo=undo,
    )
