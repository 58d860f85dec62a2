"""One turn under way: feed what is pending, sample an answer, count the cost."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from types import TracebackType

import mlx.core as mx

from amem_cli.engine.cache.feeder import passes
from amem_cli.engine.models.load import LoadedModel
from amem_cli.engine.turns.agent_state import AgentState
from amem_cli.engine.turns.generation import StopStrings, sample
from amem_cli.engine.turns.memory_budget import Reservation
from amem_cli.engine.turns.requests import Generation, PrefillProgress, TurnResult, Watcher
from amem_cli.engine.turns.steps import Steps, do, feed
from kvstore.commit.transaction import AgentHold, Transaction
from kvstore.format.manifest import Sampling
from kvstore.format.records import Domain


@dataclass(frozen=True)
class Answer:
    """The sampled tokens, the text that was streamed, and why it ended: stop, length or interrupted."""

    tokens: list[int]
    text: str
    finish: str


class TurnRun:
    """The agent of a running turn, its watcher, and the cost so far.

    A context manager: leaving it frees the agent's memory, unless the agent was handed on.
    """

    def __init__(self, name: str, watcher: Watcher, model: LoadedModel, load_ms: float) -> None:
        self.agent: AgentState | None = None
        self.room: Reservation | None = None
        self.name = name
        self.before: str | None = None
        self.reused = 0
        self.prefilled = 0
        self.parted_at: int | None = None
        self._watcher = watcher
        self._model = model
        self._load_ms = load_ms
        self._started = time.perf_counter()
        self._ttft_ms: float | None = None
        self._new_blocks = 0
        self._bytes_written = 0

    def __enter__(self) -> "TurnRun":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.agent is not None:
            self.agent.release()
        self.hand_on()

    def begin(self, agent: AgentState) -> AgentState:
        """The agent is in memory: from now on the budget counts slabs that it shares only once."""
        self.agent = agent
        if self.room is not None:
            self.room.agent = agent
        return agent

    def hand_on(self) -> None:
        """Give up the agent, without freeing its memory, and the room reserved for it."""
        self.agent = None
        if self.room is not None:
            self.room.end()
            self.room = None

    def count(self, txn: Transaction) -> None:
        """Add what a transaction wrote."""
        self._new_blocks += txn.new_blocks
        self._bytes_written += txn.bytes_written

    def feed(
        self, agent: AgentState, *, logits: bool, after_pass: Callable[[], None] = lambda: None
    ) -> Steps[tuple[mx.array | None, bool]]:
        """Feed what is pending: all of it with `logits`, else all but the last token.

        Returns the last token's logits, and whether the watcher stopped it. `after_pass` runs between passes.
        """
        total = len(agent.pending) - (0 if logits else 1)
        begun = time.perf_counter()
        last = None
        for length in _steps(agent, total, logits):
            if self._watcher.should_stop():
                return None, True
            final = self.prefilled + length == total
            last = yield from feed(agent.feeder, agent.pending[:length], logits=logits and final)
            self.prefilled += length
            speed = self.prefilled / (time.perf_counter() - begun)
            self._watcher.on_progress(PrefillProgress(self.prefilled, total, speed))
            if not final:
                after_pass()
        return last, False

    def answer(
        self, agent: AgentState, logits: mx.array | None, generation: Generation, sampling: Sampling
    ) -> Steps[Answer]:
        """Sample and feed tokens until one ends the answer; the last one stays unfed. Without logits: no answer."""
        model = self._model
        stop_ids, stream = model.prompt.stop_ids, model.prompt.stream()
        text = StopStrings(generation.stop, self._watcher.on_text)
        position = len(agent.transcript.tokens)
        longest = generation.max_tokens
        if model.context_length is not None:
            longest = min(longest, model.context_length - position)
        tokens: list[int] = []
        finish = "interrupted"
        while logits is not None:
            tokens.append(sample(logits, sampling, position + len(tokens)))
            self._ttft_ms = self._ttft_ms or (time.perf_counter() - self._started) * 1000
            if tokens[-1] not in stop_ids:
                text.add(stream.add(tokens[-1]))
            if tokens[-1] in stop_ids or text.found:
                finish = "stop"
            elif len(tokens) >= longest:
                finish = "length"
            elif not self._watcher.should_stop():
                logits = yield from feed(agent.feeder, tokens[-1:], logits=True, decode=True)
                continue
            break
        text.add(stream.finish())
        text.finish()
        return Answer(tokens, text.emitted, finish)

    def result(
        self,
        domain: Domain,
        *,
        tokens: int,
        manifest: str | None = None,
        changed: bool = True,
        complete: bool = True,
        recomputed: bool = False,
        answer: Answer | None = None,
        sampling: Sampling | None = None,
    ) -> TurnResult:
        """What the turn did. `tokens`: of the agent's whole conversation."""
        return TurnResult(
            agent=self.name,
            model=self._model.identity.name,
            domain=domain.name or domain.id,
            manifest=manifest,
            before=self.before,
            tokens=tokens,
            reused=self.reused,
            prefilled=self.prefilled,
            load_ms=self._load_ms,
            seconds=time.perf_counter() - self._started,
            template=self._model.prompt.has_template,
            generated=len(answer.tokens) if answer else 0,
            parted_at=self.parted_at,
            ttft_ms=self._ttft_ms,
            new_blocks=self._new_blocks,
            bytes_written=self._bytes_written,
            complete=complete,
            recomputed=recomputed,
            changed=changed,
            text=answer.text if answer else None,
            finish=answer.finish if answer else None,
            seed=sampling.seed if sampling else None,
            temp=sampling.temp if sampling else None,
        )


def _steps(agent: AgentState, total: int, logits: bool) -> Iterator[int]:
    """Lengths of the passes that feed `total` pending tokens. Replayed passes keep their lengths."""
    replayed = [length for length, count in agent.to_replay for _ in range(count)]
    yield from replayed
    yield from passes(agent.cached, total - sum(replayed), logits)


def entered(stack: ExitStack, holding: AbstractContextManager[AgentHold]) -> Steps[AgentHold]:
    """Wait for an agent's lock without blocking other turns; `stack` releases it."""
    hold = yield from do(holding.__enter__)
    stack.push(holding.__exit__)
    return hold
