"""A store as version 0.1.0 opens it, for `make_store` alone: what `tests.support.old_store` is for the present code.

The names are those of 0.1.0 and stay so. They are looked up when a store is opened, so that this file stands beside
code that has no such names.
"""

import itertools
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.recording import Array, Said, State

_BLOCK_TOKENS = 256


class Names:
    """What is used of 0.1.0."""

    def __init__(self) -> None:
        engine = "amem_cli.engine"
        import_module(engine)  # first of all: it chooses the BLAS
        self.find: Any = import_module(f"{engine}.registry").find
        self.passes: Any = import_module(f"{engine}.generate").passes
        self.drive: Any = import_module(f"{engine}.steps").drive
        self.text: Any = import_module(f"{engine}.transcript").Text
        self.engine: Any = import_module(f"{engine}.session").Engine
        self.generation: Any = import_module(f"{engine}.results").Generation
        self.watcher: Any = import_module(f"{engine}.results").Watcher
        self.needed_blocks: Any = import_module(f"{engine}.persist").needed_blocks
        self.state_cache: Any = import_module(f"{engine}.states").StateCache
        self.lifecycle: Any = import_module("kvstore.lifecycle")
        self.actor: Any = import_module("kvstore.journal").Actor
        self.parse_ref: Any = import_module("kvstore.naming").parse_ref
        self.store: Any = import_module("kvstore.store").Store


class Version010:
    """The store in a folder; `cache` is where models' digests may be kept. Does what `recording.Opened` says."""

    def __init__(self, root: Path, cache: Path) -> None:
        self._names = Names()
        self._store = self._names.store.open(root, self._names.actor.here("make_store", "0.1.0"))
        self._cache = cache
        self._engines: dict[str, Any] = {}

    def refs(self) -> list[str]:
        agents = [agent.name for agent in self._store.agents()]
        return agents + [f"{agent}@{found.name}" for agent in agents for found in self._store.snapshots(agent)]

    def state(self, ref: str) -> State:
        found = self._resolve(ref)
        manifest = found.manifest
        rows = [row.sha256 for row in (*manifest.pages, *self._store.blocks(manifest))]
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
            objects=sorted({*rows, *([manifest.tail.sha256] if manifest.tail else [])}),
        )

    def loaded(self, ref: str) -> dict[str, list[bytes]]:
        if not self._resolve(ref).manifest.cached:
            return {}
        agent = self._resume(ref)
        parts = dict(self._parts(agent.feeder.cache))
        agent.release()
        return parts

    def logits(self, ref: str, tokens: Sequence[int], answer: int) -> Array:
        agent = self._resume(ref)
        told = tokens[agent.cached : len(tokens) - answer]
        replayed = [length for length, count in agent.to_replay for _ in range(count)]
        new = self._names.passes(agent.cached + sum(replayed), len(told) - sum(replayed), logits=True)
        rows = []
        for length in [*replayed, *new, *[1] * (answer - 1)]:
            rows.append(agent.feeder.feed(tokens[agent.cached : agent.cached + length], logits=True))
        agent.release()
        return np.stack([np.array(row) for row in rows[-answer:]])

    def chat(self, agent: str, text: str, tokens: int, temp: float, seed: int) -> Said:
        engine = self._engine(self._resolve(agent).manifest.model.name)
        generation = self._names.generation(tokens, temp, seed=seed)
        done = engine.chat(self._names.parse_ref(agent), [self._names.text(text)], generation)
        return Said(done.text or "", done.generated, done.recomputed)

    def prefill(self, agent: str, text: str, model: str, most_passes: int | None = None) -> bool:
        asked = itertools.count()
        watcher = self._names.watcher(should_stop=lambda: next(asked) == most_passes)
        complete: bool = self._engine(model).prefill(agent, [self._names.text(text)], watcher=watcher).complete
        return complete

    def fork(self, ref: str, new: str) -> None:
        self._names.lifecycle.fork(self._store, self._names.parse_ref(ref), new)

    def restore(self, ref: str) -> None:
        self._names.lifecycle.restore(self._store, self._names.parse_ref(ref), wait=1)

    def _resolve(self, ref: str) -> Any:
        return self._store.resolve(self._names.parse_ref(ref))

    def _engine(self, model: str) -> Any:
        if model not in self._engines:
            entry = self._names.find(self._store.layout, model)
            self._engines[model] = self._names.engine(self._store, entry, self._cache)
        return self._engines[model]

    def _resume(self, ref: str) -> Any:
        state = self._resolve(ref)
        return self._names.drive(self._engine(state.manifest.model.name).conversations.resume(state))

    def _parts(self, cache: Any) -> list[tuple[str, list[bytes]]]:
        """What a cache holds: the blocks that its position needs, by layer group, and what lies behind the last."""
        last, behind = divmod(cache.offset, _BLOCK_TOKENS)
        found = []
        for part in cache.parts:
            states = isinstance(part, self._names.state_cache)
            for block in () if states else self._names.needed_blocks(part.group, cache.offset):
                found.append((f"{part.group.id} block {block}", _bytes(part.block(block))))
            found.append((f"{part.group.id} tail", _bytes(part.tail() if states else part.tail(last, behind))))
        return found


def _bytes(arrays: Sequence[Any]) -> list[bytes]:
    return [np.ascontiguousarray(array).tobytes() for array in arrays]
