"""A prefill: build an agent's cache from texts, or continue one that was cut short.

Long prefills commit incomplete states on the way, so that an interruption loses little.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from amem_cli.engine.models.load import LoadedModel
from amem_cli.engine.prompt.transcript import Text, Transcript, transcript_of
from amem_cli.engine.turns.agent_state import AgentState, AgentStates
from amem_cli.engine.turns.context import Context
from amem_cli.engine.turns.memory_budget import reserve
from amem_cli.engine.turns.requests import PrefillOptions, TurnResult
from amem_cli.engine.turns.steps import Steps
from amem_cli.engine.turns.turn import TurnRun, entered
from kvstore.commit.transaction import AgentHold, Transaction
from kvstore.errors import ConflictError
from kvstore.format.codecs import CODECS, DEFAULT_CODEC, Codec
from kvstore.format.manifest import Manifest
from kvstore.format.parts import BLOCK_TOKENS
from kvstore.format.records import AgentRef, Domain
from kvstore.history.resolve import State
from kvstore.naming import Ref
from kvstore.store import Store

CHECKPOINT_TOKENS = 4 * BLOCK_TOKENS


class Prefiller:
    """Prefills agents of one model in one store."""

    def __init__(
        self, store: Store, model: LoadedModel, agents: AgentStates, context: Context, checkpoint_seconds: float
    ) -> None:
        self._store = store
        self._model = model
        self._agents = agents
        self._context = context
        self._checkpoint_seconds = checkpoint_seconds

    def steps(self, turn: TurnRun, texts: Sequence[Text], options: PrefillOptions) -> Steps[TurnResult]:
        """Build an agent's cache from texts, or continue a prefill that was cut short.

        A repeated prefill changes nothing. A stopped one commits what it has done. Raises ConflictError if the agent
        holds another text and `replace` is not set, ModelMismatchError, UsageError for an empty prompt or one beyond
        the model's context, and what the store raises.
        """
        wanted = transcript_of(self._model.prompt, options.system, texts)
        tokens = len(wanted.tokens)
        self._context.check(tokens)
        with ExitStack() as stack:
            hold = yield from entered(stack, self._store.hold(turn.name, options.wait))
            own = self._domain(hold.agent, options.domain)
            state = self._store.resolve(Ref(turn.name)) if hold.agent else None
            if state:
                turn.before = state.digest
                self._agents.check_model(state)
                if not options.replace and self._holds(state.manifest, wanted):
                    turn.reused = tokens = state.manifest.tokens
                    return turn.result(own, tokens=tokens, manifest=state.digest, changed=False)
            codec = _codec(options.codec, state)
            turn.room = yield from reserve(self._agents.footprint(codec, tokens))
            with self._store.transaction(own) as txn:
                agent = turn.begin((yield from self._opened(turn, own, state, wanted, options.replace, codec, txn)))
                turn.reused = agent.cached
                _, stopped = yield from turn.feed(agent, logits=False, after_pass=self._checkpoints(agent, turn, hold))
                digest = self._agents.commit(agent, hold, txn, "prefill", complete=not stopped)
                turn.count(txn)
            return turn.result(own, tokens=tokens, manifest=digest, complete=not stopped)

    def _opened(
        self,
        turn: TurnRun,
        domain: Domain,
        state: State | None,
        wanted: Transcript,
        replace: bool,
        codec: Codec,
        txn: Transaction,
    ) -> Steps[AgentState]:
        """The agent to prefill: a new one, one whose prefill was cut short, or one whose text is to be replaced."""
        if state is None:
            return (yield from self._agents.begin(domain, codec, wanted, txn))
        if not state.manifest.complete and self._store.tokens(state.manifest).tolist() == wanted.tokens:
            return (yield from self._agents.resume(state))
        if not replace:
            raise ConflictError(
                f"agent {turn.name} holds another text",
                "choose another name, or --replace its text and keep what both have in common",
            )
        agent, turn.parted_at = yield from self._agents.rewind(state, codec, wanted, txn)
        return agent

    def _checkpoints(self, agent: AgentState, turn: TurnRun, hold: AgentHold) -> Callable[[], None]:
        """What a prefill runs between passes: it commits what it has, not too often."""
        last = time.perf_counter(), agent.cached

        def after_pass() -> None:
            nonlocal last
            seconds, tokens = time.perf_counter() - last[0], agent.cached - last[1]
            if tokens >= CHECKPOINT_TOKENS and seconds >= self._checkpoint_seconds:
                with self._store.transaction(agent.domain) as txn:
                    self._agents.commit(agent, hold, txn, "prefill", complete=False)
                    turn.count(txn)
                last = time.perf_counter(), agent.cached

        return after_pass

    def _holds(self, manifest: Manifest, wanted: Transcript) -> bool:
        """Whether a conversation begins with exactly these turns, whatever was added since."""
        length = len(wanted.tokens)
        if not manifest.complete or all(turn.end != length for turn in manifest.turns):
            return False
        return bool(self._store.tokens(manifest)[:length].tolist() == wanted.tokens)

    def _domain(self, agent: AgentRef | None, name: str | None) -> Domain:
        """The agent's domain. For a new agent: the one of that name, else one of its own."""
        if agent is None:
            return self._store.create_domain(name)
        domain = self._store.domain(agent.domain)
        if name is not None and domain.name != name:
            raise ConflictError(f"agent {agent.name} is in another domain than {name}", "agents never change domains")
        return domain


def _codec(name: str | None, state: State | None) -> Codec:
    """The codec of that name, else the state's, else the default one."""
    if name:
        return CODECS[name]
    return state.manifest.codec if state else CODECS[DEFAULT_CODEC]
