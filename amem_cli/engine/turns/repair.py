"""Recompute an agent's blocks from its tokens, in the passes that made them.

The same passes on the same machine give the same bits, so a damaged or missing file gets its own digest again and is
healed in place, for every state that names it. If the bits differ (another machine, other versions, blocks from another
agent's passes), a new head is committed, marked `recomputed`; snapshots do not move.
"""

import time
from dataclasses import dataclass, replace

from amem_cli.engine.persist import cache_files
from amem_cli.engine.turns.agent_state import AgentState, AgentStates
from amem_cli.engine.turns.requests import PrefillProgress, Watcher
from kvstore.commit.state import write_state
from kvstore.errors import DamageError
from kvstore.format.references import named_by
from kvstore.naming import Ref
from kvstore.store import Store


@dataclass(frozen=True)
class Repaired:
    """What a repair did. The head has moved only if `recomputed`: its bits differ."""

    before: str
    manifest: str
    healed_blocks: int = 0
    bytes_written: int = 0
    prefilled: int = 0
    recomputed: bool = False
    complete: bool = True  # False: stopped; nothing has changed


def repair(store: Store, agents: AgentStates, ref: Ref, wait: float, watcher: Watcher) -> Repaired:
    """Recompute the damaged and missing files of the state that `ref` names.

    Raises BusyError, ModelMismatchError, and DamageError if its manifest or its token ids are damaged, since they
    cannot be computed, or if an earlier state's files come out with other bits.
    """
    with store.hold(ref.agent, wait) as hold:
        state = store.resolve(ref)
        manifest, done = state.manifest, Repaired(state.digest, state.digest)
        agent = agents.replay(state)
        if manifest.evicted:
            return done
        if not _replay(agent, watcher):
            return replace(done, prefilled=agent.cached, complete=False)
        done = replace(done, prefilled=agent.cached)
        with store.transaction(agent.domain) as txn:
            new = agents.new_state(agent, "repair")
            recomputed, rows = write_state(txn, new, cache_files.CacheContent(agent.feeder.cache))
            if set(named_by(recomputed)) == set(named_by(manifest)):
                txn.heal()
            elif not ref.is_head:
                raise DamageError(
                    f"{ref} cannot be repaired: its blocks come out with other bits than they had",
                    f"repair the head, `amem repair {ref.agent}`, and use that",
                )
            else:
                agent.rows, agent.recomputed = rows, True
                digest = agents.commit(
                    agent,
                    hold,
                    txn,
                    "repair",
                    complete=manifest.complete,
                    stop=manifest.stop,
                    sampling=manifest.sampling,
                )
                done = replace(done, manifest=digest, recomputed=True)
            return replace(done, healed_blocks=txn.new_blocks, bytes_written=txn.bytes_written)


def _replay(agent: AgentState, watcher: Watcher) -> bool:
    """Run all passes again. Returns False if it was stopped."""
    total = sum(length * count for length, count in agent.to_replay)
    begun = time.perf_counter()
    for length in (length for length, count in agent.to_replay for _ in range(count)):
        if watcher.should_stop():
            return False
        agent.feeder.feed(agent.pending[:length])
        watcher.on_progress(PrefillProgress(agent.cached, total, agent.cached / (time.perf_counter() - begun)))
    return True
