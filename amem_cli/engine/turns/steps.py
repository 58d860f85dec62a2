"""A turn as steps: it says what is to be done, and whoever drives it does it.

`drive` does each step at once: that is a command's turn. The scheduler drives many turns together: it runs their
decode passes as one, their prefill passes one by one, and their reading and writing on other threads. The turns are
the same code, so they cannot differ.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from amem_cli.engine.cache.feeder import Feeder

T = TypeVar("T")


@dataclass(frozen=True)
class Pass:
    """Feed `tokens`; the answer is the last token's logits where they are wanted, else None. `decode`: one of a row."""

    feeder: Feeder
    tokens: Sequence[int]
    logits: bool = False
    decode: bool = False


@dataclass(frozen=True)
class Work:
    """Run something that makes no MLX call; the answer is what it returns."""

    run: Callable[[], Any]


@dataclass(frozen=True)
class Room:
    """Wait until the memory budget has room for an agent that will take `nbytes` at its largest.

    The answer is the `residents.Reservation`, or None where nobody counts. `agent_id`: its memory, where it is in
    memory, is part of that room.
    """

    nbytes: int
    agent_id: str | None = None


Steps = Generator[Pass | Work | Room, Any, T]


def drive(steps: Steps[T]) -> T:
    """Do each step at once, on this thread; return what the turn returns. Raises what it raises."""
    try:
        step = next(steps)
        while True:
            try:
                answer = _do(step)
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as done:
        result: T = done.value
        return result


def _do(step: Pass | Work | Room) -> Any:
    if isinstance(step, Pass):
        return step.feeder.feed(step.tokens, step.logits)
    return step.run() if isinstance(step, Work) else None
