"""One agent's turn: resume it from the store, run it, commit it.

A turn is atomic. It ends as a new head, or the agent stays where it was; only a prefill commits on the way, states
that are not complete and that the next commit takes the place of. The last token is never in the cache: a prefill
runs all tokens but the last, an answer stops with its last token unfed, so whatever follows feeds at least one
token, and a turn costs one pass before its first token. What a turn needs is checked before anything is computed.
"""

import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from amem_cli.engine.cache.probe import describe
from amem_cli.engine.models.load import load
from amem_cli.engine.models.registry import ModelEntry
from amem_cli.engine.prompt.transcript import Text, Transcript, transcript_of
from amem_cli.engine.turns.agent_state import AgentState, AgentStates
from amem_cli.engine.turns.memory_budget import MemoryBudget
from amem_cli.engine.turns.requests import NOBODY, Generation, TurnResult, Watcher
from amem_cli.engine.turns.steps import Room, Steps, Work, drive
from amem_cli.engine.turns.turn import Answer, TurnRun
from kvstore.commit.transaction import AgentHold, Transaction
from kvstore.errors import ConflictError, UsageError
from kvstore.format.codecs import CODECS, DEFAULT_CODEC, Codec
from kvstore.format.manifest import Manifest, Sampling
from kvstore.format.parts import BLOCK_TOKENS
from kvstore.format.records import AgentRef, Domain
from kvstore.history.resolve import State
from kvstore.naming import Ref
from kvstore.store import Store

CHECKPOINT_TOKENS = 4 * BLOCK_TOKENS
CHECKPOINT_SECONDS = 5.0
TEMPLATE_TOKENS = 64  # more than any template puts around a turn


class Engine:
    """A loaded model and a store. One thread calls it; it prints nothing."""

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
        self.conversations = AgentStates(store, self.model, self.spec)
        self.residents = MemoryBudget(self.conversations.pool, memory)
        self._checkpoint_seconds = checkpoint_seconds
        self._report = partial(TurnRun.result, model=self.model, load_ms=(time.perf_counter() - started) * 1000)

    def prefill(self, name: str, texts: Sequence[Text], **options: Any) -> TurnResult:
        """`prefill_steps`, each done at once."""
        return drive(self.prefill_steps(name, texts, **options))

    def extend(self, name: str, texts: Sequence[Text], **options: Any) -> TurnResult:
        """`extend_steps`, each done at once."""
        return drive(self.extend_steps(name, texts, **options))

    def chat(self, ref: Ref, texts: Sequence[Text], generation: Generation, **options: Any) -> TurnResult:
        """`chat_steps`, each done at once."""
        return drive(self.chat_steps(ref, texts, generation, **options))

    def prefill_steps(
        self,
        name: str,
        texts: Sequence[Text],
        *,
        system: str | None = None,
        domain: str | None = None,
        replace: bool = False,
        codec: str | None = None,
        wait: float = 10.0,
        watcher: Watcher = NOBODY,
    ) -> Steps[TurnResult]:
        """Build an agent's cache from texts, or go on building it. The same prefill again changes nothing.

        One that is stopped commits what it has done. Raises ConflictError where the agent holds another text and
        `replace` is not set, ModelMismatchError, UsageError for an empty prompt or one beyond the model's context,
        and what the store raises.
        """
        wanted = transcript_of(self.model.prompt, system, texts)
        tokens = len(wanted.tokens)
        self._check_length(tokens)
        with TurnRun(name, watcher) as turn, ExitStack() as stack:
            hold = yield from _entered(stack, self.store.hold(name, wait))
            own = self._domain(hold.agent, domain)
            state = self.store.resolve(Ref(name)) if hold.agent else None
            if state:
                turn.before = state.digest
                self.conversations.check_model(state)
                if not replace and self._holds(state.manifest, wanted):
                    turn.reused = tokens = state.manifest.tokens
                    return self._report(turn, domain=own, manifest=state.digest, tokens=tokens, changed=False)
            chosen = CODECS[codec] if codec else state.manifest.codec if state else CODECS[DEFAULT_CODEC]
            turn.room = yield Room(self.conversations.footprint(chosen, tokens))
            with self.store.transaction(own) as txn:
                agent = turn.begin((yield from self._opened(turn, own, state, wanted, replace, chosen, txn)))
                turn.reused = agent.cached
                _, stopped = yield from turn.feed(agent, logits=False, after_pass=self._checkpoints(agent, turn, hold))
                digest = self.conversations.commit(agent, hold, txn, "prefill", complete=not stopped)
                turn.count(txn)
            return self._report(turn, domain=own, manifest=digest, tokens=tokens, complete=not stopped)

    def extend_steps(
        self,
        name: str,
        texts: Sequence[Text],
        *,
        expect: str | None = None,
        wait: float = 10.0,
        watcher: Watcher = NOBODY,
    ) -> Steps[TurnResult]:
        """Add to an agent's context without generating. One that is stopped leaves the agent as it was.

        Raises as `chat` does.
        """
        with TurnRun(name, watcher) as turn, ExitStack() as stack:
            hold = yield from _entered(stack, self.store.hold(name, wait))
            agent = yield from self._resume(turn, self.store.resolve(Ref(name)), expect, texts)
            self._tell(agent.transcript, texts)
            tokens = len(agent.transcript.tokens)
            _, stopped = yield from turn.feed(agent, logits=False)
            digest = None if stopped else (yield from self._commit(turn, agent, hold, "extend"))
            return self._report(
                turn,
                domain=agent.domain,
                manifest=digest,
                tokens=tokens,
                changed=not stopped,
                recomputed=agent.recomputed,
            )

    def chat_steps(
        self,
        ref: Ref,
        texts: Sequence[Text],
        generation: Generation,
        *,
        save: bool = True,
        expect: str | None = None,
        wait: float = 10.0,
        watcher: Watcher = NOBODY,
    ) -> Steps[TurnResult]:
        """One turn: say `texts`, and stream the answer. Without `save` nothing is locked or written.

        A turn that is stopped before its first token leaves the agent as it was; later on, what was said is
        committed. Raises ConflictError where the head is not `expect` or its prefill has not finished,
        ModelMismatchError, UsageError, and what the store raises.
        """
        seed = secrets.randbits(32) if generation.seed is None else generation.seed
        sampling = Sampling(seed, generation.temp, generation.top_p)
        if save and not ref.is_head:
            raise UsageError(f"{ref} is not the head of {ref.agent}", f"`amem fork {ref} NEW`, or chat with --no-save")
        with TurnRun(ref.agent, watcher) as turn, ExitStack() as stack:
            hold = (yield from _entered(stack, self.store.hold(ref.agent, wait))) if save else None
            agent = yield from self._resume(turn, self.store.resolve(ref), expect, texts, generation.max_tokens)
            answer = yield from self._say(turn, agent, texts, generation, sampling)
            digest = None
            if hold is not None and answer.tokens:
                digest = yield from self._commit(turn, agent, hold, "chat", answer.finish, sampling)
            return self._report(
                turn,
                domain=agent.domain,
                manifest=digest,
                tokens=len(agent.transcript.tokens),
                changed=digest is not None,
                recomputed=agent.recomputed,
                answer=answer,
                sampling=sampling,
            )

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
        """The agent to prefill: a new one, one whose prefill was cut short, or one whose text is replaced."""
        if state is None:
            return (yield from self.conversations.begin(domain, codec, wanted, txn))
        if not state.manifest.complete and self.store.tokens(state.manifest).tolist() == wanted.tokens:
            return (yield from self.conversations.resume(state))
        if not replace:
            raise ConflictError(
                f"agent {turn.name} holds another text",
                "choose another name, or --replace its text and keep what both have in common",
            )
        agent, turn.parted_at = yield from self.conversations.rewind(state, codec, wanted, txn)
        return agent

    def _checkpoints(self, agent: AgentState, turn: TurnRun, hold: AgentHold) -> Callable[[], None]:
        """What a prefill does between passes: now and then it commits what it has."""
        last = time.perf_counter(), agent.cached

        def after_pass() -> None:
            nonlocal last
            seconds, tokens = time.perf_counter() - last[0], agent.cached - last[1]
            if tokens >= CHECKPOINT_TOKENS and seconds >= self._checkpoint_seconds:
                with self.store.transaction(agent.domain) as txn:
                    self.conversations.commit(agent, hold, txn, "prefill", complete=False)
                    turn.count(txn)
                last = time.perf_counter(), agent.cached

        return after_pass

    def _say(
        self, turn: TurnRun, agent: AgentState, texts: Sequence[Text], generation: Generation, sampling: Sampling
    ) -> Steps[Answer]:
        """Put the texts to the agent and let it answer."""
        self._tell(agent.transcript, texts, answered=True)
        logits, _ = yield from turn.feed(agent, logits=True)
        answer = yield from turn.answer(agent, self.model, logits, generation, sampling)
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
                digest = self.conversations.commit(agent, hold, txn, op, stop=stop, sampling=sampling)
                turn.count(txn)
            return digest

        # blocks are written from the host's views; states are arrays of MLX, for its own thread only
        digest: str = write() if agent.feeder.cache.states else (yield Work(write))
        turn.hand_on()
        agent.share()
        self.residents.put(agent)
        return digest

    def _resume(
        self, turn: TurnRun, state: State, expect: str | None, texts: Sequence[Text], answer: int = 0
    ) -> Steps[AgentState]:
        """The agent at `state`, with room for texts and `answer` tokens: still in memory, or out of the store.

        Raises ConflictError where it is not what the caller expects, or its prefill has not finished, and UsageError
        for texts that cannot be told to it.
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
        self.conversations.check_model(state)
        most, limit = state.manifest.tokens + self._length(texts) + answer, self.model.context_length
        if limit is not None and most > limit:
            # a text that is too long is that, however much memory there is
            told = Transcript.of(state.manifest, self.store.tokens(state.manifest).tolist())
            self._tell(told, texts, answered=answer > 0)
            most = limit
        turn.room = yield Room(self.conversations.footprint(state.manifest.codec, most), state.agent.id)
        agent = self.residents.take(state.agent.id, state.digest)
        if agent is None:
            agent = yield from self.conversations.resume(state)
        turn.reused = agent.cached
        return turn.begin(agent)

    def _tell(self, transcript: Transcript, texts: Sequence[Text], answered: bool = False) -> None:
        """Add texts, and open an answer. Raises UsageError where the context ends before they do."""
        for text in texts:
            transcript.add(self.model.prompt, text)
        if answered:
            transcript.begin_answer(self.model.prompt)
        self._check_length(len(transcript.tokens) + answered)

    def _length(self, texts: Sequence[Text]) -> int:
        """Tokens that texts may become, with what a template puts around them."""
        return sum(len(self.model.prompt.encode(text.text)) + TEMPLATE_TOKENS for text in texts) + TEMPLATE_TOKENS

    def _holds(self, manifest: Manifest, wanted: Transcript) -> bool:
        """Whether a conversation begins with exactly this text, whatever was said since."""
        length = len(wanted.tokens)
        if not manifest.complete or all(turn.end != length for turn in manifest.turns):
            return False
        return bool(self.store.tokens(manifest)[:length].tolist() == wanted.tokens)

    def _domain(self, agent: AgentRef | None, name: str | None) -> Domain:
        """The domain that the agent is in, or a new agent's: its own, unless one is named."""
        if agent is None:
            return self.store.create_domain(name)
        domain = self.store.domain(agent.domain)
        if name is not None and domain.name != name:
            raise ConflictError(f"agent {agent.name} is in another domain than {name}", "agents never change domains")
        return domain

    def _check_length(self, tokens: int) -> None:
        limit = self.model.context_length
        if limit is not None and tokens > limit:
            raise UsageError(
                f"the conversation would have {tokens} tokens, and the model's context ends at {limit}",
                "give less text, or use a model with a longer context",
            )


def _entered(stack: ExitStack, holding: AbstractContextManager[AgentHold]) -> Steps[AgentHold]:
    """Wait for an agent without keeping others waiting; `stack` gives it back."""
    hold: AgentHold = yield Work(holding.__enter__)
    stack.push(holding.__exit__)
    return hold
