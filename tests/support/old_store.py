"""A store as the code beside these tests opens it: the one place where the tests of an old store use its insides.

It does what `tests.support.recording.Opened` says, by whatever names and ways the code has now. What it returns must
stay what it was: the store in `tests/data` and what is recorded of it never change.
"""

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from amem_cli.engine.cache.agent_cache import AgentCache
from amem_cli.engine.cache.block_cache import BlockCache
from amem_cli.engine.cache.feeder import passes
from amem_cli.engine.models.registry import find
from amem_cli.engine.prompt.transcript import Text
from amem_cli.engine.turns.agent_state import AgentState
from amem_cli.engine.turns.engine import Engine
from amem_cli.engine.turns.requests import Generation, Watcher
from amem_cli.engine.turns.steps import drive
from kvstore import lifecycle
from kvstore.commit.journal import Actor
from kvstore.format.parts import BLOCK_TOKENS
from kvstore.history.resolve import State as Resolved
from kvstore.naming import Ref, parse_ref
from kvstore.store import Store
from tests.support.recording import Array, Said, State


class OldStore:
    """The store in a folder; `cache` is where models' digests may be kept. Each model is loaded once."""

    def __init__(self, root: Path, cache: Path) -> None:
        self._store = Store.open(root, Actor.here("test", "0"))
        self._cache = cache
        self._engines: dict[str, Engine] = {}

    def refs(self) -> list[str]:
        agents = [agent.name for agent in self._store.agents()]
        return agents + [f"{agent}@{found.name}" for agent in agents for found in self._store.snapshots(agent)]

    def state(self, ref: str) -> State:
        found = self._resolve(ref)
        manifest = found.manifest
        pages = [row.sha256 for row in manifest.pages]
        blocks = [row.sha256 for row in self._store.blocks(manifest)]
        return State(
            digest=found.digest,
            op=manifest.op,
            model=manifest.model.name,
            codec=manifest.codec.name,
            domain=self._store.domain(manifest.domain).name,
            tokens=[int(token) for token in self._store.tokens(manifest)],
            cached=manifest.cached,
            turns=[(turn.role, turn.start, turn.end, turn.label) for turn in manifest.turns],
            owed=list(manifest.owed),
            complete=manifest.complete,
            recomputed=manifest.recomputed,
            objects=sorted({*pages, *blocks, *([manifest.tail.sha256] if manifest.tail else [])}),
        )

    def loaded(self, ref: str) -> dict[str, list[bytes]]:
        if not self._resolve(ref).manifest.cached:
            return {}
        agent = self._resume(ref)
        parts = dict(_parts(agent.feeder.cache))
        agent.release()
        return parts

    def logits(self, ref: str, tokens: Sequence[int], answer: int) -> Array:
        agent = self._resume(ref)
        told = tokens[agent.cached : len(tokens) - answer]
        replayed = [length for length, count in agent.to_replay for _ in range(count)]
        lengths = [*replayed, *passes(agent.cached + sum(replayed), len(told) - sum(replayed), logits=True)]
        rows = []
        for length in [*lengths, *[1] * (answer - 1)]:
            rows.append(agent.feeder.feed(tokens[agent.cached : agent.cached + length], logits=True))
        agent.release()
        return np.stack([np.array(row) for row in rows[-answer:]])

    def chat(self, agent: str, text: str, tokens: int, temp: float, seed: int) -> Said:
        engine = self._engine(self._resolve(agent).manifest.model.name)
        done = engine.chat(Ref(agent), [Text(text)], Generation(tokens, temp, seed=seed))
        return Said(done.text or "", done.generated, done.recomputed)

    def prefill(self, agent: str, text: str, model: str, most_passes: int | None = None) -> bool:
        asked = itertools.count()

        def should_stop() -> bool:
            return next(asked) == most_passes

        return self._engine(model).prefill(agent, [Text(text)], watcher=Watcher(should_stop=should_stop)).complete

    def fork(self, ref: str, new: str) -> None:
        lifecycle.fork(self._store, parse_ref(ref), new)

    def restore(self, ref: str) -> None:
        lifecycle.restore(self._store, parse_ref(ref), wait=1)

    def _resolve(self, ref: str) -> Resolved:
        return self._store.resolve(parse_ref(ref))

    def _engine(self, model: str) -> Engine:
        if model not in self._engines:
            self._engines[model] = Engine(self._store, find(self._store.layout, model), self._cache)
        return self._engines[model]

    def _resume(self, ref: str) -> AgentState:
        state = self._resolve(ref)
        return drive(self._engine(state.manifest.model.name).agents.resume(state))


def _parts(cache: AgentCache) -> list[tuple[str, list[bytes]]]:
    """What a cache holds: the blocks that its position needs, by layer group, and what lies behind the last of them."""
    last, behind = divmod(cache.offset, BLOCK_TOKENS)
    found = []
    for part in cache.caches:
        if isinstance(part, BlockCache):
            for block in part.group.needed_blocks(cache.offset):
                found.append((f"{part.group.id} block {block}", _bytes(part.block(block))))
        found.append((f"{part.group.id} tail", _bytes(part.tail(last, behind))))
    return found


def _bytes(arrays: Iterable[npt.NDArray[Any]]) -> list[bytes]:
    return [np.ascontiguousarray(array).tobytes() for array in arrays]
