"""The two kinds of caches that benchmarks/fidelity.py feeds side by side: one that never leaves memory, mlx-lm's own in
full precision, and an agent that goes to disk and comes back.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from amem_cli import __version__
from amem_cli.engine.cache.probe import describe
from amem_cli.engine.models.load import LoadedModel
from amem_cli.engine.prompt.transcript import Transcript
from amem_cli.engine.turns.agent_state import AgentState, AgentStates
from amem_cli.engine.turns.steps import drive
from kvstore.commit.journal import Actor
from kvstore.format.codecs import CODECS
from kvstore.format.feeds import add_feed
from kvstore.naming import Ref
from kvstore.store import Store


class Cache(Protocol):
    """A context that grows pass by pass."""

    nbytes: int  # of the files that it was last restored from

    def feed(self, ids: Sequence[int]) -> None:
        """One pass, whose logits are not computed."""

    def score(self, ids: Sequence[int]) -> mx.array:
        """One pass. Returns log probabilities [tokens, vocabulary] in float32, evaluated."""

    def through_disk(self) -> None:
        """Save, leave memory, and come back from what was saved."""


class Reference:
    """mlx-lm's own cache: full precision, in memory from the first token to the last."""

    nbytes = 0

    def __init__(self, model: LoadedModel) -> None:
        self._model = model.model
        self._layers = make_prompt_cache(model.model)

    def feed(self, ids: Sequence[int]) -> None:
        self._model(mx.array([list(ids)]), cache=self._layers)
        mx.eval([cache.state for cache in self._layers])

    def score(self, ids: Sequence[int]) -> mx.array:
        found = _log_probabilities(self._model, ids, self._layers)
        mx.eval(found, [cache.state for cache in self._layers])
        return found

    def through_disk(self) -> None:
        """It stays where it is."""


class StoredAgent:
    """An agent in a domain of its own, named by its codec. All of `ids` is its text; what it was not fed is pending."""

    def __init__(self, store: Store, model: LoadedModel, codec: str, ids: Sequence[int]) -> None:
        self.nbytes = 0
        self._store, self._model, self._name = store, model, codec
        self._conversations = AgentStates(store, model, describe(model.model))
        domain = store.create_domain()
        with store.transaction(domain) as txn:
            new = self._conversations.begin(domain, CODECS[codec], Transcript(list(ids)), txn)
            self._agent: AgentState = drive(new)

    def feed(self, ids: Sequence[int]) -> None:
        self._agent.feeder.feed(ids)

    def score(self, ids: Sequence[int]) -> mx.array:
        feeder = self._agent.feeder
        found = _log_probabilities(feeder.model, ids, feeder.cache.layers)
        feeder.cache.settle(len(ids), found)
        feeder.feeds = add_feed(feeder.feeds, len(ids))
        return found

    def through_disk(self) -> None:
        """Commit, and resume as another process would: the store opened anew, and nothing kept but the weights."""
        with self._store.transaction(self._agent.domain) as txn, self._store.hold(self._name, 0) as hold:
            self._conversations.commit(self._agent, hold, txn, "prefill", complete=False)
        del self._agent
        self._store = Store.open(self._store.layout.root, Actor.here("benchmark", __version__))
        self._conversations = AgentStates(self._store, self._model, describe(self._model.model))
        state = self._store.resolve(Ref(self._name))
        blocks, tail = self._store.blocks(state.manifest), state.manifest.tail
        self.nbytes = sum(row.bytes for row in blocks) + (tail.bytes if tail else 0)
        self._agent = drive(self._conversations.resume(state))


def _log_probabilities(model: Any, ids: Sequence[int], layers: Any) -> mx.array:
    logits: mx.array = model(mx.array([list(ids)]), cache=layers)[0].astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)
