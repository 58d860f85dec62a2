"""`amem repair`: compute damaged or missing blocks again from their tokens."""

from amem_cli import turns
from amem_cli.shell import signals
from amem_cli.shell.options import DEFAULT_WAIT, Call, ModelName, State, Wait, command, new_app
from amem_cli.shell.output import digest, human_size
from kvstore.naming import parse_ref

app = new_app()


@command(app)
def repair(call: Call, ref: State, model: ModelName = None, wait: Wait = DEFAULT_WAIT) -> None:
    """Compute an agent's blocks again, in the passes that made them, and put back what is damaged or missing."""
    state = parse_ref(ref)
    store = call.open_store()
    entry = turns.choose_model(call, model, store, store.resolve(state).agent)
    engine = turns.load_engine(call, store, entry)
    from amem_cli.engine.turns.repair import repair as run
    from amem_cli.engine.turns.requests import Watcher

    with signals.listening() as stop, call.out.progress("repair") as bar:
        watcher = Watcher(on_progress=lambda at: bar.update(at.done, at.total, at.tokens_per_second), should_stop=stop)
        done = run(store, engine.agents, state, wait, watcher)
    if not done.complete:
        call.out.warn(f"the repair of {state} was stopped: nothing has changed")
    elif done.recomputed:
        call.out.warn(
            f"{state} has a new head: its blocks came out with other bits than they had; snapshots did not move"
        )
    else:
        size = human_size(done.bytes_written)
        call.out.say(f"{state}: {done.healed_blocks} blocks put back, {size} written; every digest is the one it was")
    call.out.result(
        call.command,
        str(state),
        ok=not stop(),
        agent=state.agent,
        before=digest(done.before),
        manifest=digest(done.manifest),
        healed_blocks=done.healed_blocks,
        bytes_written=done.bytes_written,
        prefilled=done.prefilled,
        recomputed=done.recomputed,
        complete=done.complete,
    )
    stop.finish()
