"""One agent's turn: resume it from the store, run it, commit it.

A turn is atomic: it commits a new head, or the agent stays as it was. Only a prefill commits on the way: incomplete
states, which the next commit replaces. The last token is never in the cache: a prefill runs all tokens but the last,
and an answer ends with its last token unfed. So every turn feeds at least one token, and its first token costs one
pass. All conditions are checked before anything is computed.

`prefill`, `extend` and `chat` drive the generators of the same name with `_steps`, which the scheduler drives itself.
The way to a forward pass: `chat_steps` > `TurnRun.feed` > `steps.feed` > `Pass.run` > `Feeder.feed` > the model.
"""

import secrets
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from amem_cli.engine.cache.probe import describe
from amem_cli.engine.models.load import load
from amem_cli.engine.models.registry import ModelEntry
from amem_cli.engine.prompt.transcript import Text, Transcript
from amem_cli.engine.turns.agent_state import AgentState, AgentStates
from amem_cli.engine.turns.context import Context
from amem_cli.engine.turns.memory_budget import MemoryBudget, reserve
from amem_cli.engine.turns.prefill import Prefiller
from amem_cli.engine.turns.requests import (
    CHAT_DEFAULTS,
    EXTEND_DEFAULTS,
    NOBODY,
    PREFILL_DEFAULTS,
    ChatOptions,
    ExtendOptions,
    Generation,
    PrefillOptions,
    TurnResult,
    Watcher,
)
from amem_cli.engine.turns.steps import Steps, do, drive
from amem_cli.engine.turns.turn import Answer, TurnRun, entered
from kvstore.commit.transaction import AgentHold
from kvstore.errors import ConflictError, UsageError
from kvstore.format.manifest import Sampling
from kvstore.history.resolve import State
from kvstore.naming import Ref
from kvstore.store import Store

CHECKPOINT_SECONDS = 5.0


class Engine:
    """A loaded model and a store, for one thread. It prints nothing."""

    def __init__(
        self,
        store: Store,
        entry: ModelEntry,
        cache_dir: Path,
        checkpoint_seconds: float = CHECKPOINT_SECONDS,
        memory: int | None = None,
    ) -> None:
        """Load the model. `memory`: bytes that agents' caches may take together; None keeps one agent between turns.

        Raises NotFoundError and ModelMismatchError.
        """
        started = time.perf_counter()
        self.store = store
        self.model = load(entry, cache_dir)
        self.spec = describe(self.model.model)
        self.agents = AgentStates(store, self.model, self.spec)
        self.memory_budget = MemoryBudget(self.agents.pool, memory)
        self._context = Context(self.model)
        self._prefiller = Prefiller(store, self.model, self.agents, self._context, checkpoint_seconds)
        self._load_ms = (time.perf_counter() - started) * 1000

    def prefill(
        self,
        name: str,
        texts: Sequence[Text],
        options: PrefillOptions = PREFILL_DEFAULTS,
        watcher: Watcher = NOBODY,
    ) -> TurnResult:
        """Perform `prefill_steps`."""
        return drive(self.prefill_steps(name, texts, options, watcher))

    def extend(
        self,
        name: str,
        texts: Sequence[Text],
        options: ExtendOptions = EXTEND_DEFAULTS,
        watcher: Watcher = NOBODY,
    ) -> TurnResult:
        """Perform `extend_steps`."""
        return drive(self.extend_steps(name, texts, options, watcher))

    def chat(
        self,
        ref: Ref,
        texts: Sequence[Text],
        generation: Generation,
        options: ChatOptions = CHAT_DEFAULTS,
        watcher: Watcher = NOBODY,
    ) -> TurnResult:
        """Perform `chat_steps`."""
        return drive(self.chat_steps(ref, texts, generation, options, watcher))

    def prefill_steps(
        self,
        name: str,
        texts: Sequence[Text],
        options: PrefillOptions = PREFILL_DEFAULTS,
        watcher: Watcher = NOBODY,
    ) -> Steps[TurnResult]:
        """Build an agent's cache from texts; see `Prefiller.steps`."""
        with self._turn(name, watcher) as turn:
            return (yield from self._prefiller.steps(turn, texts, options))

    def extend_steps(
        self,
        name: str,
        texts: Sequence[Text],
        options: ExtendOptions = EXTEND_DEFAULTS,
        watcher: Watcher = NOBODY,
    ) -> Steps[TurnResult]:
        """Add to an agent's context without generating. If stopped, the agent stays as it was. Raises as `chat`."""
        with self._turn(name, watcher) as turn, ExitStack() as stack:
            hold = yield from entered(stack, self.store.hold(name, options.wait))
            agent = yield from self._resume(turn, self.store.resolve(Ref(name)), options.expect, texts)
            self._context.add(agent.transcript, texts)
            tokens = len(agent.transcript.tokens)
            _, stopped = yield from turn.feed(agent, logits=False)
            digest = None if stopped else (yield from self._commit(turn, agent, hold, "extend"))
            return turn.result(
                agent.domain, tokens=tokens, manifest=digest, changed=not stopped, recomputed=agent.recomputed
            )

    def chat_steps(
        self,
        ref: Ref,
        texts: Sequence[Text],
        generation: Generation,
        options: ChatOptions = CHAT_DEFAULTS,
        watcher: Watcher = NOBODY,
    ) -> Steps[TurnResult]:
        """One turn: add `texts`, and stream the answer.

        If stopped before its first token, the agent stays as it was; after that, the answer so far is committed.
        Raises ConflictError if the head is not `expect` or its prefill was cut short, ModelMismatchError, UsageError,
        and what the store raises.
        """
        seed = secrets.randbits(32) if generation.seed is None else generation.seed
        sampling = Sampling(seed, generation.temp, generation.top_p)
        if options.save and not ref.is_head:
            raise UsageError(f"{ref} is not the head of {ref.agent}", f"`amem fork {ref} NEW`, or chat with --no-save")
        with self._turn(ref.agent, watcher) as turn, ExitStack() as stack:
            hold = (yield from entered(stack, self.store.hold(ref.agent, options.wait))) if options.save else None
            state = self.store.resolve(ref)
            agent = yield from self._resume(turn, state, options.expect, texts, generation.max_tokens)
            answer = yield from self._answer(turn, agent, texts, generation, sampling)
            digest = None
            if hold is not None and answer.tokens:
                digest = yield from self._commit(turn, agent, hold, "chat", answer.finish, sampling)
            return turn.result(
                agent.domain,
                tokens=len(agent.transcript.tokens),
                manifest=digest,
                changed=digest is not None,
                recomputed=agent.recomputed,
                answer=answer,
                sampling=sampling,
            )

    def _turn(self, name: str, watcher: Watcher) -> TurnRun:
        return TurnRun(name, watcher, self.model, self._load_ms)

    def _answer(
        self, turn: TurnRun, agent: AgentState, texts: Sequence[Text], generation: Generation, sampling: Sampling
    ) -> Steps[Answer]:
        """Add the texts and generate the answer to them."""
        self._context.add(agent.transcript, texts, answered=True)
        logits, _ = yield from turn.feed(agent, logits=True)
        answer = yield from turn.answer(agent, logits, generation, sampling)
        if answer.tokens:
            prompt = self.model.prompt
            agent.transcript.end_answer(prompt, answer.tokens, answer.tokens[-1] in prompt.stop_ids)
        return answer

    def _commit(
        self,
        turn: TurnRun,
        agent: AgentState,
        hold: AgentHold,
        op: str,
        stop: str | None = None,
        sampling: Sampling | None = None,
    ) -> Steps[str]:
        """Make the agent's state its head, and keep it in memory for its next turn."""

        def write() -> str:
            with self.store.transaction(agent.domain) as txn:
                digest = self.agents.commit(agent, hold, txn, op, stop=stop, sampling=sampling)
                turn.count(txn)
            return digest

        # blocks are written from the host's views; recurrent states are MLX arrays, for the MLX thread only
        digest = write() if agent.feeder.cache.recurrent else (yield from do(write))
        turn.hand_on()
        agent.share()
        self.memory_budget.put(agent)
        return digest

    def _resume(
        self, turn: TurnRun, state: State, expect: str | None, texts: Sequence[Text], answer: int = 0
    ) -> Steps[AgentState]:
        """The agent at `state`, from memory or from the store, with room for `texts` and `answer` tokens.

        Raises ConflictError if the state is not the expected one or its prefill was cut short, and UsageError for
        texts that cannot be added.
        """
        if expect is not None and not state.digest.startswith(expect):
            raise ConflictError(
                f"{state.ref} has moved: it is at sha256:{state.digest[:12]}", "look at it, then ask again"
            )
        if not state.manifest.complete:
            raise ConflictError(
                f"the prefill of {state.ref.agent} was cut short", "run the same `amem prefill` again to finish it"
            )
        turn.before = state.digest
        self.agents.check_model(state)
        most, limit = state.manifest.tokens + self._context.longest(texts) + answer, self._context.limit
        if limit is not None and most > limit:
            # a text that is too long is reported as such, not as one that needs too much memory
            trial = Transcript.of(state.manifest, self.store.tokens(state.manifest).tolist())
            self._context.add(trial, texts, answered=answer > 0)
            most = limit
        turn.room = yield from reserve(self.agents.footprint(state.manifest.codec, most), state.agent.id)
        agent = self.memory_budget.take(state.agent.id, state.digest)
        if agent is None:
            agent = yield from self.agents.resume(state)
        turn.reused = agent.cached
        return turn.begin(agent)
