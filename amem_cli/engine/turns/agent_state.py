"""Agents in memory: begun, resumed or rewound from the store, and committed to it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from amem_cli.engine.cache.agent_cache import footprint
from amem_cli.engine.cache.feeder import Feeder
from amem_cli.engine.cache.probe import ModelCacheSpec
from amem_cli.engine.cache.slabs import SlabPool
from amem_cli.engine.models import fingerprint
from amem_cli.engine.models.load import LoadedModel
from amem_cli.engine.persist import cache_files
from amem_cli.engine.prompt.transcript import Transcript, common_prefix
from amem_cli.engine.turns.steps import Steps, do
from kvstore.commit.state import NewState, Rows, write_state
from kvstore.commit.transaction import AgentHold, Transaction
from kvstore.errors import ModelMismatchError
from kvstore.format.codecs import Codec
from kvstore.format.feeds import cut_feeds
from kvstore.format.layers import cut_position
from kvstore.format.manifest import FileRow, Manifest, Sampling
from kvstore.format.parts import BLOCK_TOKENS
from kvstore.format.records import Domain
from kvstore.history.resolve import State, history_from
from kvstore.naming import new_id
from kvstore.store import Store


@dataclass
class AgentState:
    """An agent in memory, and which parts of it are on disk."""

    agent_id: str
    domain: Domain
    codec: Codec
    transcript: Transcript
    feeder: Feeder
    head: str | None = None  # digest of the agent's head on disk
    previous: str | None = None  # digest that the next manifest names as `previous`
    rows: Rows = field(default_factory=dict)
    closed: tuple[FileRow, ...] = ()  # full pages on disk
    recomputed: bool = False
    to_replay: tuple[tuple[int, int], ...] = ()  # passes to be run again, after an eviction

    @property
    def cached(self) -> int:
        return self.feeder.cache.offset

    @property
    def pending(self) -> list[int]:
        return self.transcript.tokens[self.cached :]

    def share(self) -> None:
        """Share its full slabs with other agents of its domain. All of its state must be committed."""
        cache_files.share(self.domain.id, self.rows, self.feeder.cache, np.array(self.transcript.tokens, np.int32))

    def release(self) -> None:
        """Free its memory."""
        self.feeder.cache.release()


class AgentStates:
    """Opens and commits the agents of one model in one store."""

    def __init__(self, store: Store, model: LoadedModel, spec: ModelCacheSpec) -> None:
        self._store = store
        self._model = model
        self._spec = spec
        self.pool = SlabPool()

    def footprint(self, codec: Codec, tokens: int) -> int:
        """Bytes of memory that an agent of `tokens` tokens takes."""
        return footprint(self._spec.groups, codec, tokens)

    def begin(self, domain: Domain, codec: Codec, transcript: Transcript, txn: Transaction) -> Steps[AgentState]:
        """A new agent, started from the longest prefix of its tokens that its domain holds."""
        new = self._empty(new_id(), domain, codec, transcript)
        yield from self._reuse(new, *self._longest_prefix(new, txn))
        return new

    def resume(self, state: State) -> Steps[AgentState]:
        """The agent as it was committed; an evicted one still has all its passes to replay.

        Raises ModelMismatchError, DamageError and IsolationError.
        """
        agent, manifest = self.replay(state), state.manifest
        if manifest.evicted:
            agent.recomputed = True
            return agent
        yield from self._load(agent, manifest, manifest.cached)
        agent.to_replay = ()
        return agent

    def replay(self, state: State) -> AgentState:
        """The agent with an empty cache and all its passes to replay. Raises ModelMismatchError."""
        self.check_model(state)
        manifest = state.manifest
        transcript = Transcript.of(manifest, self._store.tokens(manifest).tolist())
        agent = self._empty(manifest.agent, self._store.domain(manifest.domain), manifest.codec, transcript)
        self._continue(agent, state)
        agent.to_replay = manifest.feeds
        return agent

    def rewind(
        self, state: State, codec: Codec, transcript: Transcript, txn: Transaction
    ) -> Steps[tuple[AgentState, int]]:
        """The agent with another text: it keeps as much as it can of the common beginning.

        Returns it with the first token that differs. Full-attention layers can be cut at any group of 64 tokens;
        with other layers the agent returns to the last of its own states, or the last stored prefix, before that.
        """
        self.check_model(state)
        agent = self._empty(state.manifest.agent, self._store.domain(state.manifest.domain), codec, transcript)
        self._continue(agent, state)
        parted_at = common_prefix(self._store.tokens(state.manifest).tolist(), transcript.tokens)
        found = self._longest_state(state, codec, transcript.tokens, parted_at)
        blocks, rows = self._longest_prefix(agent, txn)
        if found is None or blocks * BLOCK_TOKENS > found[1]:
            yield from self._reuse(agent, blocks, rows)
        else:
            yield from self._load(agent, *found)
        return agent, parted_at

    def commit(
        self,
        agent: AgentState,
        hold: AgentHold,
        txn: Transaction,
        op: str,
        *,
        complete: bool = True,
        stop: str | None = None,
        sampling: Sampling | None = None,
    ) -> str:
        """Make the agent's state its head; return its digest. If the store raises, the head stays as it was."""
        new = self.new_state(agent, op, complete=complete, stop=stop, sampling=sampling)
        manifest, rows = write_state(txn, new, cache_files.CacheContent(agent.feeder.cache), agent.rows, agent.closed)
        digest = txn.commit(hold, manifest, agent.head)
        agent.head, agent.rows = digest, rows
        agent.closed = cache_files.closed_pages(manifest, manifest.cached)
        if complete:
            agent.previous = digest
        return digest

    def new_state(
        self,
        agent: AgentState,
        op: str,
        *,
        complete: bool = True,
        stop: str | None = None,
        sampling: Sampling | None = None,
    ) -> NewState:
        """The agent's state as it would be committed."""
        return NewState(
            agent=agent.agent_id,
            previous=agent.previous,
            op=op,
            model=self._model.identity,
            codec=agent.codec,
            groups=self._spec.groups,
            tokens=np.array(agent.transcript.tokens, np.int32),
            cached=agent.cached,
            feeds=agent.feeder.feeds,
            turns=tuple(agent.transcript.turns),
            owed=tuple(agent.transcript.owed),
            stop=stop,
            sampling=sampling,
            complete=complete,
            recomputed=agent.recomputed,
        )

    def check_model(self, state: State) -> None:
        """Raises ModelMismatchError, naming what differs, unless this model computed the state."""
        name, present = state.ref.agent, self._model.identity
        differing = fingerprint.compare(state.manifest.model, present)
        if differing:
            raise ModelMismatchError(
                f"agent {name} was made with other {' and '.join(differing)} than {present.name} has now",
                "use the model that it was made with, or prefill a new agent",
            )
        if state.manifest.groups != self._spec.groups:
            raise ModelMismatchError(
                f"agent {name} was made by a model with another layout of layers",
                "use the version of mlx-lm that it was made with, or prefill a new agent",
            )

    def _empty(self, agent_id: str, domain: Domain, codec: Codec, transcript: Transcript) -> AgentState:
        cache = self._spec.new_cache(codec, self.pool)
        return AgentState(agent_id, domain, codec, transcript, Feeder(self._model.model, cache))

    def _continue(self, agent: AgentState, state: State) -> None:
        """The next commit follows `state`, or replaces it if it is incomplete."""
        agent.head = state.digest
        agent.previous = state.digest if state.manifest.complete else state.manifest.previous
        agent.recomputed = state.manifest.recomputed

    def _load(self, agent: AgentState, manifest: Manifest, position: int) -> Steps[None]:
        """Load a stored state into an empty cache, up to `position`."""
        tokens = np.array(agent.transcript.tokens, np.int32)
        yield from _loaded(
            agent, partial(cache_files.load, self._store, manifest, agent.feeder.cache, tokens, position)
        )
        agent.closed = cache_files.closed_pages(manifest, position)
        agent.feeder.feeds = cut_feeds(manifest.feeds, position)

    def _reuse(self, agent: AgentState, blocks: int, rows: Rows) -> Steps[None]:
        """Start an empty cache from the first `blocks` blocks of its domain."""
        if blocks:
            tokens = np.array(agent.transcript.tokens, np.int32)
            cache, position = agent.feeder.cache, blocks * BLOCK_TOKENS
            reading = partial(cache_files.load_blocks, self._store, agent.domain.id, rows, cache, tokens, position)
            yield from _loaded(agent, reading)
            agent.feeder.feeds = ((BLOCK_TOKENS, blocks),)

    def _longest_prefix(self, agent: AgentState, txn: Transaction) -> tuple[int, Rows]:
        """How many blocks of the agent's tokens its domain holds for all layer groups, and the rows of those needed."""
        usable = (len(agent.transcript.tokens) - 1) // BLOCK_TOKENS
        if not all(group.layer_kind.has_blocks for group in self._spec.groups):
            return 0, {}  # a recurrent state has no prefix key
        wanted = self.new_state(agent, "prefill")
        found: Rows = {}
        for group in self._spec.groups:
            keys = wanted.prefix_keys(agent.domain, group)[:usable]
            found |= {(group.id, n): row for n, row in enumerate(txn.find(keys)) if row}
        for blocks in range(usable, 0, -1):
            needed = [(g.id, n) for g in self._spec.groups for n in g.needed_blocks(blocks * BLOCK_TOKENS)]
            if all(key in found for key in needed):
                return blocks, {key: found[key] for key in needed}
        return 0, {}

    def _longest_state(
        self, head: State, codec: Codec, tokens: list[int], parted_at: int
    ) -> tuple[Manifest, int] | None:
        """The state in the agent's history, and the position in it, that keeps most of `tokens`."""
        limit, manifest = len(tokens) - 1, head.manifest
        found: list[tuple[int, Manifest]] = []
        if manifest.codec == codec:
            found.append((cut_position(self._spec.groups, min(parted_at, manifest.cached, limit)), manifest))
        for _, earlier in history_from(self._store, manifest.domain, head.digest):
            if (earlier.model, earlier.codec) == (manifest.model, codec) and earlier.cached <= limit:
                cached = self._store.tokens(earlier)[: earlier.cached].tolist()
                if cached == tokens[: earlier.cached]:
                    found.append((earlier.cached, earlier))
        position, best = max(found, key=lambda at: at[0], default=(0, manifest))
        return (best, position) if position else None


def _loaded(agent: AgentState, begin: Callable[[], cache_files.Loading]) -> Steps[None]:
    """Read what an agent is loaded from. If that fails, its memory is freed."""
    try:
        loading = begin()
        yield from do(loading.read)
        agent.rows = loading.finish()
    except Exception:
        agent.release()
        raise
