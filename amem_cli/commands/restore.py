"""`amem restore`: move an agent's head to one of its states. What was the head stays in its history."""

from amem_cli.shell.options import DEFAULT_WAIT, Call, Expect, Note, State, Wait, command, new_app
from amem_cli.shell.output import digest
from kvstore.naming import parse_ref

app = new_app()


@command(app)
def restore(call: Call, ref: State, expect: Expect = None, wait: Wait = DEFAULT_WAIT, note: Note = None) -> None:
    """Move an agent's head to a state; the command that undoes it is shown."""
    from kvstore import lifecycle

    state = parse_ref(ref)
    done = lifecycle.restore(call.open_store(), state, wait, expect, note)
    undo = f"amem restore {done.undo}" if done.undo else None
    if undo:
        call.out.say(f"{state.agent} was at {digest(done.before)} and is at {digest(done.after)}")
        call.out.say(f"undo: {undo}")
    else:
        call.out.say(f"{state.agent} is at that state already")
    call.out.result(
        call.command,
        state.agent,
        agent=state.agent,
        before=digest(done.before),
        after=digest(done.after),
        undo=undo,
    )
