"""One agent's turn: resume it from the store, run it, commit it.

A turn is atomic. It ends as a new head, or the agent stays where it was; only a prefill commits on the way, states
that are not complete and that the next commit takes the place of. The last token is never in the cache: a prefill
runs all tokens but the last, an answer stops with its last token unfed, so whatever follows feeds at least one
token, and a turn costs one pass before its first token. What a turn needs is checked before anything is computed.
"""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from amem_cli.engine.conversation import Conversation, Conversations
from amem_cli.engine.generate import StopStrings, passes, sample
from amem_cli.engine.model import load
from amem_cli.engine.registry import ModelEntry
from amem_cli.engine.results import NOBODY, Generation, Progress, TurnResult, Watcher
from amem_cli.engine.spec import describe
from amem_cli.engine.transcript import Text, Transcript, transcript_of
from kvstore.errors import ConflictError, UsageError
from kvstore.history import State
from kvstore.manifest import Manifest, Sampling
from kvstore.naming import Ref
from kvstore.refs import AgentRef, Domain
from kvstore.shapes import BLOCK_TOKENS, CODECS, DEFAULT_CODEC
from kvstore.store import Store
from kvstore.transaction import AgentHold, Transaction

CHECKPOINT_BLOCKS = 4
CHECKPOINT_SECONDS = 5.0


@dataclass
class _Turn:
    """One turn under way: whose it is, and what it has cost so far."""

    name: str
    watcher: Watcher
    started: float
    before: str | None = None
    reused: int = 0
    prefilled: int = 0
    parted_at: int | None = None
    ttft_ms: float | None = None
    new_blocks: int = 0
    bytes_written: int = 0

    def count(self, txn: Transaction) -> None:
        """Add what a transaction wrote."""
        self.new_blocks += txn.new_blocks
        self.bytes_written += txn.bytes_written


@dataclass(frozen=True)
class _Answer:
    tokens: list[int]
    text: str
    finish: str  # stop, length or interrupted


class Engine:
    """A loaded model and a store. One thread calls it; it prints nothing."""

    def __init__(
        self, store: Store, entry: ModelEntry, cache_dir: Path, checkpoint_seconds: float = CHECKPOINT_SECONDS
    ) -> None:
        """Load the model. Raises NotFoundError and ModelMismatchError."""
        started = time.perf_counter()
        self._store = store
        self.model = load(entry, cache_dir)
        self._conversations = Conversations(store, self.model, describe(self.model.model))
        self._checkpoint_seconds = checkpoint_seconds
        self._resident: Conversation | None = None
        self._load_ms = (time.perf_counter() - started) * 1000

    def prefill(
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
    ) -> TurnResult:
        """Build an agent's cache from texts, or go on building it. The same prefill again changes nothing.

        One that is stopped commits what it has done. Raises ConflictError where the agent holds another text and
        `replace` is not set, ModelMismatchError, UsageError for an empty prompt or one beyond the model's context,
        and what the store raises.
        """
        turn = _Turn(name, watcher, time.perf_counter())
        wanted = transcript_of(self.model.prompt, system, texts)
        self._check_length(len(wanted.tokens))
        with self._store.hold(name, wait) as hold:
            own = self._domain(hold.agent, domain)
            state = self._store.resolve(Ref(name)) if hold.agent else None
            if state:
                turn.before = state.digest
                self._conversations.check_model(state)
                if not replace and self._holds(state.manifest, wanted):
                    tokens = state.manifest.tokens
                    return self._result(turn, own, manifest=state.digest, tokens=tokens, reused=tokens, changed=False)
            with self._store.transaction(own) as txn:
                agent = self._opened(turn, own, state, wanted, replace, codec, txn)
                turn.reused = agent.cached
                _, stopped = self._feed(agent, turn, logits=False, hold=hold)
                digest = self._conversations.commit(agent, hold, txn, "prefill", complete=not stopped)
                turn.count(txn)
            agent.release()
        tokens = len(agent.transcript.tokens)
        return self._result(turn, own, manifest=digest, tokens=tokens, complete=not stopped)

    def chat(
        self,
        ref: Ref,
        texts: Sequence[Text],
        generation: Generation,
        *,
        save: bool = True,
        expect: str | None = None,
        wait: float = 10.0,
        watcher: Watcher = NOBODY,
    ) -> TurnResult:
        """One turn: say `texts`, and stream the answer. Without `save` nothing is locked or written.

        A turn that is stopped before its first token leaves the agent as it was; later on, what was said is
        committed. Raises ConflictError where the head is not `expect` or its prefill has not finished,
        ModelMismatchError, UsageError, and what the store raises.
        """
        turn = _Turn(ref.agent, watcher, time.perf_counter())
        if not save:
            agent, _, facts = self._say(turn, self._store.resolve(ref), expect, texts, generation)
            agent.release()
            return self._result(turn, agent.domain, changed=False, **facts)
        if not ref.is_head:
            raise UsageError(
                f"{ref} is not the head of {ref.agent}",
                f"fork it and chat with the fork, go back with `amem restore {ref}`, or chat with --no-save",
            )
        with self._store.hold(ref.agent, wait) as hold:
            agent, sampling, facts = self._say(turn, self._store.resolve(ref), expect, texts, generation)
            if not facts["generated"]:
                agent.release()
                return self._result(turn, agent.domain, changed=False, **facts)
            with self._store.transaction(agent.domain) as txn:
                stop = facts["finish"]
                digest = self._conversations.commit(agent, hold, txn, "chat", stop=stop, sampling=sampling)
                turn.count(txn)
        self._resident = agent
        return self._result(turn, agent.domain, manifest=digest, **facts)

    def _opened(
        self,
        turn: _Turn,
        domain: Domain,
        state: State | None,
        wanted: Transcript,
        replace: bool,
        codec: str | None,
        txn: Transaction,
    ) -> Conversation:
        """The agent to prefill: a new one, one whose prefill was cut short, or one whose text is replaced."""
        if state is None:
            return self._conversations.begin(domain, CODECS[codec or DEFAULT_CODEC], wanted, txn)
        if not state.manifest.complete and self._store.tokens(state.manifest).tolist() == wanted.tokens:
            return self._conversations.resume(state)
        if not replace:
            raise ConflictError(
                f"agent {turn.name} holds another text",
                "choose another name, or --replace its text and keep what both have in common",
            )
        chosen = CODECS[codec] if codec else state.manifest.codec
        agent, turn.parted_at = self._conversations.rewind(state, chosen, wanted, txn)
        return agent

    def _say(
        self, turn: _Turn, state: State, expect: str | None, texts: Sequence[Text], generation: Generation
    ) -> tuple[Conversation, Sampling, dict[str, Any]]:
        """Run a turn up to its commit. Returns the agent, how it was sampled, and what there is to report."""
        _check_head(state, expect)
        turn.before = state.digest
        agent = self._resume(state)
        turn.reused = agent.cached
        transcript, prompt = agent.transcript, self.model.prompt
        for text in texts:
            transcript.add(prompt, text)
        transcript.begin_answer(prompt)
        self._check_length(len(transcript.tokens) + 1)
        seed = secrets.randbits(32) if generation.seed is None else generation.seed
        sampling = Sampling(seed, generation.temp, generation.top_p)
        logits, _ = self._feed(agent, turn, logits=True)
        answer = self._answer(agent, turn, logits, generation, sampling)
        if answer.tokens:
            transcript.end_answer(prompt, answer.tokens, answer.tokens[-1] in prompt.stop_ids)
        return (
            agent,
            sampling,
            {
                "tokens": len(transcript.tokens),
                "generated": len(answer.tokens),
                "recomputed": agent.recomputed,
                "text": answer.text,
                "finish": answer.finish,
                "seed": seed,
                "temp": generation.temp,
            },
        )

    def _feed(
        self, agent: Conversation, turn: _Turn, *, logits: bool, hold: AgentHold | None = None
    ) -> tuple[mx.array | None, bool]:
        """Feed what is pending: all of it where logits are wanted, else all but the last token.

        Returns the last token's logits, and whether it was stopped on the way. With `hold` it commits now and then.
        """
        total = len(agent.pending) - (0 if logits else 1)
        begun = committed = time.perf_counter()
        last, blocks = None, 0
        for length in passes(agent.cached, total, logits):
            if turn.watcher.should_stop():
                return None, True
            final = turn.prefilled + length == total
            last = agent.feeder.feed(agent.pending[:length], logits=logits and final)
            turn.prefilled += length
            blocks += agent.cached % BLOCK_TOKENS == 0
            now = time.perf_counter()
            turn.watcher.on_progress(Progress(turn.prefilled, total, turn.prefilled / (now - begun)))
            if hold and not final and blocks >= CHECKPOINT_BLOCKS and now - committed >= self._checkpoint_seconds:
                with self._store.transaction(agent.domain) as txn:
                    self._conversations.commit(agent, hold, txn, "prefill", complete=False)
                    turn.count(txn)
                committed, blocks = time.perf_counter(), 0
        return last, False

    def _answer(
        self, agent: Conversation, turn: _Turn, logits: mx.array | None, generation: Generation, sampling: Sampling
    ) -> _Answer:
        """Sample and feed tokens until one ends the answer; the last one stays unfed. No logits: no answer."""
        watcher, stop_ids = turn.watcher, self.model.prompt.stop_ids
        said, stream = StopStrings(generation.stop, watcher.on_text), self.model.prompt.stream()
        position = len(agent.transcript.tokens)
        room = generation.max_tokens
        if self.model.context_length is not None:
            room = min(room, self.model.context_length - position)
        tokens: list[int] = []
        finish = "interrupted"
        while logits is not None:
            tokens.append(sample(logits, sampling, position + len(tokens)))
            turn.ttft_ms = turn.ttft_ms or (time.perf_counter() - turn.started) * 1000
            if tokens[-1] not in stop_ids:
                said.add(stream.add(tokens[-1]))
            if tokens[-1] in stop_ids or said.found:
                finish = "stop"
            elif len(tokens) >= room:
                finish = "length"
            elif not watcher.should_stop():
                logits = agent.feeder.feed(tokens[-1:], logits=True)
                continue
            break
        said.add(stream.finish())
        said.finish()
        return _Answer(tokens, said.text, finish)

    def _resume(self, state: State) -> Conversation:
        """The agent at `state`: still in memory from the turn before, or out of the store."""
        kept, self._resident = self._resident, None
        if kept is not None and kept.head == state.digest:
            return kept
        if kept is not None:
            kept.release()
        return self._conversations.resume(state)

    def _holds(self, manifest: Manifest, wanted: Transcript) -> bool:
        """Whether a conversation begins with exactly this text, whatever was said since."""
        length = len(wanted.tokens)
        if not manifest.complete or all(turn.end != length for turn in manifest.turns):
            return False
        return bool(self._store.tokens(manifest)[:length].tolist() == wanted.tokens)

    def _domain(self, agent: AgentRef | None, name: str | None) -> Domain:
        """The domain that the agent is in, or a new agent's: its own, unless one is named."""
        if agent is None:
            return self._store.create_domain(name)
        domain = self._store.domain(agent.domain)
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

    def _result(self, turn: _Turn, domain: Domain, *, manifest: str | None = None, **facts: Any) -> TurnResult:
        spent = {name: getattr(turn, name) for name in ("before", "prefilled", "parted_at", "ttft_ms")}
        written = {"new_blocks": turn.new_blocks, "bytes_written": turn.bytes_written}
        return TurnResult(
            agent=turn.name,
            model=self.model.identity.name,
            domain=domain.name,
            manifest=manifest,
            load_ms=self._load_ms,
            seconds=time.perf_counter() - turn.started,
            template=self.model.prompt.has_template,
            **{"reused": turn.reused} | spent | written | facts,
        )


def _check_head(state: State, expect: str | None) -> None:
    if expect is not None and not state.digest.startswith(expect):
        raise ConflictError(f"{state.ref} has moved: it is at sha256:{state.digest[:12]}", "look at it, then ask again")
    if not state.manifest.complete:
        raise ConflictError(
            f"the prefill of {state.ref.agent} was cut short", "run the same `amem prefill` again to finish it"
        )
