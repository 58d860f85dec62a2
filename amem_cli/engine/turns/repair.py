"""Compute an agent's blocks again from its tokens, in the passes that made them.

The same passes on the same machine give the same bits, so what is damaged or missing comes back under its own
digest and is healed in place: every state that names it is whole again. Where the bits differ all the same (another
machine, other versions, blocks that came out of another agent's passes), a new head is committed, marked `recomputed`;
snapshots keep naming what they named.
"""

import time
from dataclasses import dataclass, replace

import numpy as np

from amem_cli.engine.persist import cache_files
from amem_cli.engine.turns.agent_state import AgentState, AgentStates
from amem_cli.engine.turns.requests import PrefillProgress, Watcher
from kvstore.errors import DamageError
from kvstore.format.manifest import FileRow, Manifest
from kvstore.naming import Ref
from kvstore.store import Store


@dataclass(frozen=True)
class Repaired:
    """What a repair did. The head is another one only where `recomputed` says that its bits differ."""

    before: str
    manifest: str
    healed_blocks: int = 0
    bytes_written: int = 0
    prefilled: int = 0
    recomputed: bool = False
    complete: bool = True  # False: it was stopped, and nothing has changed


def repair(store: Store, conversations: AgentStates, ref: Ref, wait: float, watcher: Watcher) -> Repaired:
    """Make the state that `ref` names whole again.

    Raises BusyError, ModelMismatchError, and DamageError where its manifest or its token ids are damaged, since
    nothing can be computed then, or where an earlier state's bits cannot be had back.
    """
    with store.hold(ref.agent, wait) as hold:
        state = store.resolve(ref)
        manifest, done = state.manifest, Repaired(state.digest, state.digest)
        agent = conversations.replay(state)
        if manifest.evicted:
            return done
        if not _replay(agent, watcher):
            return replace(done, prefilled=agent.cached, complete=False)
        done = replace(done, prefilled=agent.cached)
        cache, tokens = agent.feeder.cache, np.array(agent.transcript.tokens, np.int32)
        with store.transaction(agent.domain) as txn:
            rows = cache_files.save_blocks(txn, agent.domain, manifest.model, cache, tokens, {})
            tail = cache_files.save_tail(txn, agent.domain, manifest.model, cache)
            if _same(store, manifest, rows, tail):
                txn.heal()
            elif not ref.is_head:
                raise DamageError(
                    f"{ref} cannot be made whole: its blocks come out with other bits than they had",
                    f"repair the head, `amem repair {ref.agent}`, and name that",
                )
            else:
                agent.rows, agent.recomputed = rows, True
                stop, sampling = manifest.stop, manifest.sampling
                digest = conversations.commit(
                    agent, hold, txn, "repair", complete=manifest.complete, stop=stop, sampling=sampling
                )
                done = replace(done, manifest=digest, recomputed=True)
            return replace(done, healed_blocks=txn.new_blocks, bytes_written=txn.bytes_written)


def _replay(agent: AgentState, watcher: Watcher) -> bool:
    """Make all passes again. Returns whether it was left to finish."""
    total = sum(length * count for length, count in agent.to_replay)
    begun = time.perf_counter()
    for length in (length for length, count in agent.to_replay for _ in range(count)):
        if watcher.should_stop():
            return False
        agent.feeder.feed(agent.pending[:length])
        watcher.on_progress(PrefillProgress(agent.cached, total, agent.cached / (time.perf_counter() - begun)))
    return True


def _same(store: Store, manifest: Manifest, rows: cache_files.Rows, tail: FileRow | None) -> bool:
    """Whether the blocks and the tail that were computed are those that the manifest names."""
    named = cache_files.rows_of(store.blocks(manifest))
    return tail == manifest.tail and all(named[key].sha256 == row.sha256 for key, row in rows.items())
