"""`amem repair`: recompute damaged or missing blocks from their tokens."""

from amem_cli import turns
from amem_cli.shell import signals
from amem_cli.shell.options import DEFAULT_WAIT, Call, ModelName, State, Wait, command, new_app
from amem_cli.shell.output import counted, digest, human_size
from kvstore.format.kinds import BLOCK
from kvstore.naming import parse_ref

app = new_app()


@command(app)
def repair(call: Call, ref: State, model: ModelName = None, wait: Wait = DEFAULT_WAIT) -> None:
    """Recompute an agent's blocks, in the passes that made them, and restore damaged or missing ones."""
    state = parse_ref(ref)
    store = call.open_store()
    entry = turns.choose_model(call, model, store, store.resolve(state).agent)
    engine = turns.load_engine(call, store, entry)
    from amem_cli.engine.turns.repair import repair as run

    with signals.listening() as stop, call.out.progress("repair") as bar:
        done = run(store, engine.agents, state, wait, turns.watcher_of(bar, stop))
    if not done.complete:
        call.out.warn(f"repair of {state} was interrupted; nothing changed")
    elif done.recomputed:
        call.out.warn(
            f"{state} has a new head: its recomputed blocks differ from the stored ones; its snapshots are unchanged"
        )
    else:
        restored = f"{counted(done.healed_blocks, BLOCK.name)} restored, {human_size(done.bytes_written)} written"
        call.out.info(f"{state}: {restored}; all digests unchanged")
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
