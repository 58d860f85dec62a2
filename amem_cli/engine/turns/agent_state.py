"""An agent in memory: begun, resumed or rewound from the store, and committed to it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from amem_cli.engine.cache.feeder import Feeder
from amem_cli.engine.cache.probe import ModelCacheSpec
from amem_cli.engine.cache.slabs import SlabPool, footprint
from amem_cli.engine.models import fingerprint
from amem_cli.engine.models.load import LoadedModel
from amem_cli.engine.persist import cache_files
from amem_cli.engine.prompt.transcript import Transcript, common_prefix
from amem_cli.engine.turns.steps import Steps, do
from kvstore.commit.transaction import AgentHold, Transaction
from kvstore.disk.clock import timestamp
from kvstore.errors import ModelMismatchError
from kvstore.format.codecs import Codec
from kvstore.format.feeds import cut_feeds
from kvstore.format.manifest import FileRow, Manifest, Sampling, features_of
from kvstore.format.parts import BLOCK_TOKENS, GROUP_TOKENS
from kvstore.format.records import Domain
from kvstore.history.resolve import State
from kvstore.naming import new_id
from kvstore.store import Store


@dataclass
class AgentState:
    """An agent in memory, and what of it is on disk."""

    agent_id: str
    domain: Domain
    codec: Codec
    transcript: Transcript
    feeder: Feeder
    head: str | None = None  # the agent's state on disk that this one goes on from
    previous: str | None = None  # the state that the next manifest names as the one before it
    rows: cache_files.Rows = field(default_factory=dict)
    closed: tuple[FileRow, ...] = ()
    recomputed: bool = False
    to_replay: tuple[tuple[int, int], ...] = ()  # passes to be made again, the blocks that they made being gone

    @property
    def cached(self) -> int:
        return self.feeder.cache.offset

    @property
    def pending(self) -> list[int]:
        return self.transcript.tokens[self.cached :]

    def share(self) -> None:
        """Have what it shares in memory with other agents of its domain. What it has committed must be all it has."""
        cache_files.share(self.domain.id, self.rows, self.feeder.cache, np.array(self.transcript.tokens, np.int32))

    def release(self) -> None:
        """Give its memory back."""
        self.feeder.cache.release()


class AgentStates:
    """Opens and commits the conversations of one model in one store."""

    def __init__(self, store: Store, model: LoadedModel, spec: ModelCacheSpec) -> None:
        self._store = store
        self._model = model
        self._spec = spec
        self.pool = SlabPool()

    def footprint(self, codec: Codec, tokens: int) -> int:
        """Bytes of memory that an agent of `tokens` tokens takes."""
        return footprint(self._spec.groups, codec, tokens)

    def begin(self, domain: Domain, codec: Codec, transcript: Transcript, txn: Transaction) -> Steps[AgentState]:
        """A new agent. It starts from the longest prefix that its domain holds already."""
        new = self._empty(new_id(), domain, codec, transcript)
        yield from self._reuse(new, *self._longest_prefix(new, txn))
        return new

    def resume(self, state: State) -> Steps[AgentState]:
        """The agent as it was committed; one that was evicted still has all its passes to replay.

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
        """The agent at its beginning, all of its passes still to be made again. Raises ModelMismatchError."""
        self.check_model(state)
        manifest = state.manifest
        transcript = Transcript.of(manifest, self._store.tokens(manifest).tolist())
        agent = self._empty(manifest.agent, self._store.domain(manifest.domain), manifest.codec, transcript)
        self._go_on(agent, state)
        agent.to_replay = manifest.feeds
        return agent

    def rewind(
        self, state: State, codec: Codec, transcript: Transcript, txn: Transaction
    ) -> Steps[tuple[AgentState, int]]:
        """The agent with another text: it keeps what it can of what both have in common.

        Returns it with the token at which the two part. Full-attention layers can be cut at any group of 64 tokens;
        with window layers the agent goes back to the last of its own states, or the last stored prefix, before that.
        """
        self.check_model(state)
        agent = self._empty(state.manifest.agent, self._store.domain(state.manifest.domain), codec, transcript)
        self._go_on(agent, state)
        parted_at = common_prefix(self._store.tokens(state.manifest).tolist(), transcript.tokens)
        found = self._longest_state(state.manifest, codec, transcript.tokens, parted_at)
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
        """Make the agent's state its head; return its digest. What the store raises leaves the head where it was."""
        cache, identity = agent.feeder.cache, self._model.identity
        tokens = np.array(agent.transcript.tokens, np.int32)
        rows = cache_files.save_blocks(txn, agent.domain, identity, cache, tokens, agent.rows)
        tail = cache_files.save_tail(txn, agent.domain, identity, cache)
        pages = cache_files.save_pages(txn, agent.domain, cache, tokens, rows, agent.closed)
        manifest = Manifest(
            agent=agent.agent_id,
            domain=agent.domain.id,
            salt=agent.domain.salt,
            previous=agent.previous,
            resumes=None,
            op=op,
            model=identity,
            codec=agent.codec,
            groups=self._spec.groups,
            tokens=len(tokens),
            cached=cache.offset,
            pages=pages,
            window_blocks=cache_files.window_rows(cache, rows),
            tail=tail,
            feeds=agent.feeder.feeds,
            turns=tuple(agent.transcript.turns),
            owed=tuple(agent.transcript.owed),
            stop=stop,
            sampling=sampling,
            complete=complete,
            created=timestamp(),
            recomputed=agent.recomputed,
            features=features_of(agent.codec),
        )
        digest = txn.commit(hold, manifest, agent.head)
        agent.head, agent.rows = digest, rows
        agent.closed = cache_files.closed_pages(manifest, manifest.cached)
        if complete:
            agent.previous = digest
        return digest

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
                f"agent {name} was made by a model whose layers were laid out otherwise",
                "use the version of mlx-lm that it was made with, or prefill a new agent",
            )

    def _empty(self, agent_id: str, domain: Domain, codec: Codec, transcript: Transcript) -> AgentState:
        cache = self._spec.new_cache(codec, self.pool)
        return AgentState(agent_id, domain, codec, transcript, Feeder(self._model.model, cache))

    def _go_on(self, agent: AgentState, state: State) -> None:
        """What is committed next follows `state`, or takes the place of one that was cut short."""
        agent.head = state.digest
        agent.previous = state.digest if state.manifest.complete else state.manifest.previous
        agent.recomputed = state.manifest.recomputed

    def _load(self, agent: AgentState, manifest: Manifest, position: int) -> Steps[None]:
        """Bring an empty cache to where a stored state was at `position`."""
        tokens = np.array(agent.transcript.tokens, np.int32)
        yield from _loaded(
            agent, partial(cache_files.load, self._store, manifest, agent.feeder.cache, tokens, position)
        )
        agent.closed = cache_files.closed_pages(manifest, position)
        agent.feeder.feeds = cut_feeds(manifest.feeds, position)

    def _reuse(self, agent: AgentState, blocks: int, rows: cache_files.Rows) -> Steps[None]:
        """Start an empty cache from the first `blocks` blocks, which its domain holds."""
        if blocks:
            tokens = np.array(agent.transcript.tokens, np.int32)
            cache, position = agent.feeder.cache, blocks * BLOCK_TOKENS
            reading = partial(cache_files.load_blocks, self._store, agent.domain.id, rows, cache, tokens, position)
            yield from _loaded(agent, reading)
            agent.feeder.feeds = ((BLOCK_TOKENS, blocks),)

    def _longest_prefix(self, agent: AgentState, txn: Transaction) -> tuple[int, cache_files.Rows]:
        """How many blocks of the agent's tokens its domain holds for all layer groups alike, and their rows."""
        usable = (len(agent.transcript.tokens) - 1) // BLOCK_TOKENS
        if any(group.kind == "recurrent" for group in self._spec.groups):
            return 0, {}  # a state belongs to a position, and no prefix key stands for it
        tokens = np.array(agent.transcript.tokens[: usable * BLOCK_TOKENS], np.int32)
        found: cache_files.Rows = {}
        for group in self._spec.groups:
            keys = cache_files.prefix_keys(agent.domain, self._model.identity, agent.codec, group, tokens)
            found |= {(group.id, n): row for n, row in enumerate(txn.find(keys)) if row}
        for blocks in range(usable, 0, -1):
            position = blocks * BLOCK_TOKENS
            needed = [(g.id, n) for g in self._spec.groups for n in cache_files.needed_blocks(g, position)]
            if all(key in found for key in needed):
                return blocks, {key: found[key] for key in needed}
        return 0, {}

    def _longest_state(
        self, head: Manifest, codec: Codec, tokens: list[int], parted_at: int
    ) -> tuple[Manifest, int] | None:
        """The state in the agent's history, and the position in it, that keeps most of `tokens`."""
        limit = len(tokens) - 1
        found: list[tuple[int, Manifest]] = []
        if head.codec == codec and all(group.kind == "full" for group in self._spec.groups):
            found.append((min(parted_at, head.cached, limit) // GROUP_TOKENS * GROUP_TOKENS, head))
        for manifest in self._history(head):
            if (manifest.model, manifest.codec) == (head.model, codec) and manifest.cached <= limit:
                cached = self._store.tokens(manifest)[: manifest.cached].tolist()
                if cached == tokens[: manifest.cached]:
                    found.append((manifest.cached, manifest))
        position, best = max(found, key=lambda at: at[0], default=(0, head))
        return (best, position) if position else None

    def _history(self, head: Manifest) -> Iterator[Manifest]:
        manifest = head
        yield manifest
        while manifest.previous and self._store.has_manifest(head.domain, manifest.previous):
            manifest = self._store.manifest(head.domain, manifest.previous)
            yield manifest


def _loaded(agent: AgentState, begin: Callable[[], cache_files.Loading]) -> Steps[None]:
    """Read what an agent is loaded from; where that fails its memory is given back."""
    try:
        loading = begin()
        yield from do(loading.read)
        agent.rows = loading.finish()
    except Exception:
        agent.release()
        raise
