"""A turn as steps: a generator that asks for passes, I/O and memory, and is driven by others.

`drive` performs each step at once: that is a command's turn. The scheduler drives many turns together: their decode
passes run as one step, their prefill passes one by one, their I/O on other threads. Both drive the same code, so the
two kinds of turns cannot differ.

A turn yields steps through `do`, `feed` and `memory_budget.reserve`, which give each answer its type.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

import mlx.core as mx

from amem_cli.engine.cache.feeder import Feeder

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class Pass:
    """Feed `tokens`. The answer: the last token's logits if `logits`, else None.

    `decode`: the pass may run in a decode batch.
    """

    feeder: Feeder
    tokens: Sequence[int]
    logits: bool = False
    decode: bool = False

    def run(self) -> mx.array | None:
        """The pass by itself."""
        return self.feeder.feed(self.tokens, self.logits)


@dataclass(frozen=True)
class Work(Generic[T_co]):
    """Run a function that makes no MLX call. The answer: what it returns."""

    run: Callable[[], T_co]


@dataclass(frozen=True)
class Room:
    """Wait until the memory budget has room for an agent that takes up to `nbytes`.

    The answer: a `memory_budget.Reservation`, or None where memory is not counted. `agent_id`: an agent whose memory,
    if it is in memory now, is part of that room.
    """

    nbytes: int
    agent_id: str | None = None


Step = Pass | Work[object] | Room
Steps = Generator[Step, object, T]


def do(work: Callable[[], T]) -> Steps[T]:
    """Run `work`, which makes no MLX call; returns what it returns."""
    return cast(T, (yield Work(work)))


def feed(
    feeder: Feeder, tokens: Sequence[int], *, logits: bool = False, decode: bool = False
) -> Steps[mx.array | None]:
    """Run one `Pass`; returns the last token's logits [vocabulary] in float32 if `logits`."""
    return cast(mx.array | None, (yield Pass(feeder, tokens, logits, decode)))


def drive(steps: Steps[T]) -> T:
    """Perform each step at once, on this thread; return what the turn returns. Raises what it raises."""
    try:
        step = next(steps)
        while True:
            try:
                answer = None if isinstance(step, Room) else step.run()
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as done:
        result: T = done.value
        return result
