"""Many turns at once, on the one thread that owns MLX.

Each round of the loop collects finished I/O, admits turns that fit into the memory budget, runs one decode step for
all agents that generate, and then prefill passes, at least one, for as long as the decode step took. Prefilling agents
alternate pass by pass, so that a long text delays the others by one pass at most. The number of passes is scheduled;
their boundaries are not, so a turn's bits depend on the turns beside it only by float rounding. Meanwhile I/O threads
read blocks into the next agents' memory.

A failing turn ends alone: a decode step of several agents that raises is run again row by row. `on_fallback` hears of
the first such step, and `SchedulerFigures.row_by_row_steps` counts them.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from amem_cli.engine.cache.decode_batch import can_batch, decode_together
from amem_cli.engine.turns.engine import Engine
from amem_cli.engine.turns.steps import Pass, Room, Step, Steps, Work

IO_THREADS = 4

T = TypeVar("T")


class Ticket(Generic[T]):
    """A submitted turn. `future` ends with its result, or with what it raised."""

    def __init__(
        self, agent: str, begin: "Callable[[Ticket[T]], Steps[T]]", priority: int, timeout: float | None
    ) -> None:
        self.future: Future[T] = Future()
        self.agent = agent
        self.priority = priority
        self.decoded = 0  # tokens of the answer that went through the model
        self._begin = begin
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._cancelled = False

    def begin(self) -> Steps[T]:
        return self._begin(self)

    def cancel(self) -> None:
        """End the turn soon: the answer so far is committed. May be called from any thread."""
        self._cancelled = True

    def should_stop(self) -> bool:
        """Whether it was cancelled or its timeout is over. The turn's watcher asks this."""
        return self._cancelled or (self._deadline is not None and time.monotonic() > self._deadline)


@dataclass
class _Task:
    """A running turn, and the step that it waits for."""

    ticket: Ticket[Any]
    steps: Steps[Any]
    order: int
    step: Step | None = None


@dataclass
class SchedulerFigures:
    """What the loop did."""

    decode_steps: int = 0
    decoded: int = 0
    row_by_row_steps: int = 0  # decode steps that failed for several agents together
    prefill_passes: int = 0
    work_seconds: float = 0.0
    idle_seconds: float = 0.0  # waiting for I/O, with nothing else to do

    @property
    def hidden(self) -> float:
        """The share of I/O time during which the model ran."""
        return 1.0 - min(self.idle_seconds / self.work_seconds, 1.0) if self.work_seconds else 1.0


@dataclass
class Scheduler:
    """Drives turns of one engine. `submit` may be called from any thread, `run` by the thread that owns MLX.

    `on_fallback` is called once, with the error of the first decode step that was run again row by row.
    """

    engine: Engine
    batched: bool = True
    on_fallback: Callable[[Exception], None] = lambda _: None
    figures: SchedulerFigures = field(default_factory=SchedulerFigures)

    def __post_init__(self) -> None:
        self._incoming: SimpleQueue[Ticket[Any]] = SimpleQueue()
        self._numbers = count()
        self._behind: dict[str, deque[Ticket[Any]]] = {}  # by agent: turns behind its running one
        self._next: deque[Ticket[Any]] = deque()  # the first of those, once the turn before it has ended
        self._tasks: list[_Task] = []
        self._prefills: deque[_Task] = deque()
        self._working: dict[Future[tuple[object, float]], _Task] = {}
        self._waker: Future[None] = Future()
        self._step_seconds = 0.0
        self.batched = self.batched and can_batch(self.engine.model.model, self.engine.spec)

    def submit(
        self,
        agent: str,
        begin: Callable[[Ticket[T]], Steps[T]],
        priority: int = 0,
        timeout: float | None = None,
    ) -> Ticket[T]:
        """Submit a turn of an agent; `begin` makes its steps when it starts. An agent's turns run in their order.

        Higher priorities are admitted first. `timeout` in seconds ends the turn as `Ticket.cancel` does.
        """
        ticket = Ticket(agent, begin, priority, timeout)
        self._incoming.put(ticket)
        self.wake()
        return ticket

    def wake(self) -> None:
        """Make a waiting loop look for work again."""
        waker = self._waker
        if not waker.done():
            waker.set_result(None)

    def run(self, more: Callable[[], bool] = lambda: False) -> None:
        """Drive turns until none is left and `more()` is false. It is called in every round, and may submit turns."""
        with ThreadPoolExecutor(IO_THREADS) as self._io:
            while True:
                expecting = more()
                self._take_in()
                self._collect()
                self._admit()
                decoded = self._decode()
                if not self._prefill() and not decoded and not self._rest(expecting):
                    return

    def _take_in(self) -> None:
        """Begin what was handed in. What a turn does before its first step is checking, and quick."""
        while self._next:
            self._begin(self._next.popleft())
        while True:
            try:
                ticket = self._incoming.get_nowait()
            except Empty:
                return
            if ticket.agent in self._behind:
                self._behind[ticket.agent].append(ticket)
            else:
                self._behind[ticket.agent] = deque()
                self._begin(ticket)

    def _begin(self, ticket: Ticket[Any]) -> None:
        task = _Task(ticket, ticket.begin(), next(self._numbers))
        self._tasks.append(task)
        self._advance(task, None)

    def _advance(self, task: _Task, answer: object) -> None:
        """Send a turn the answer to its step (None starts it), and run it to its next step or its end."""
        self._resume(task, lambda: task.steps.send(answer))

    def _throw(self, task: _Task, error: BaseException) -> None:
        """Raise the error of a turn's step inside the turn."""
        self._resume(task, lambda: task.steps.throw(error))

    def _resume(self, task: _Task, resume: Callable[[], Step]) -> None:
        try:
            task.step = resume()
        except StopIteration as done:
            task.ticket.future.set_result(done.value)
            self._end(task)
        except Exception as error:
            task.ticket.future.set_exception(error)
            self._end(task)
        else:
            if isinstance(task.step, Work):
                self._working[self._io.submit(self._timed, task.step.run)] = task
            elif isinstance(task.step, Pass) and not task.step.decode:
                self._prefills.append(task)

    def _end(self, task: _Task) -> None:
        self._tasks.remove(task)
        task.step = None
        behind = self._behind[task.ticket.agent]
        if behind:
            self._next.append(behind.popleft())
        else:
            del self._behind[task.ticket.agent]

    def _timed(self, run: Callable[[], object]) -> tuple[object, float]:
        begun = time.perf_counter()
        return run(), time.perf_counter() - begun

    def _collect(self) -> None:
        """Send turns the results of finished I/O."""
        for future in [future for future in self._working if future.done()]:
            task = self._working.pop(future)
            error = future.exception()
            if error is not None:
                self._throw(task, error)
            else:
                result, seconds = future.result()
                self.figures.work_seconds += seconds
                self._advance(task, result)

    def _admit(self) -> None:
        """Admit turns that fit, by priority, then by age. No turn overtakes one that does not fit yet.

        Turns that can never run, or that were stopped, end at once, wherever they are in the queue.
        """
        budget = self.engine.memory_budget
        for task, room in self._waiting_for_room():
            try:
                if task.ticket.should_stop():
                    raise CancelledError("stopped before it began")
                budget.check(room.nbytes)
            except Exception as error:
                self._throw(task, error)
        for task, room in self._waiting_for_room():
            reservation = budget.reserve(room.nbytes, room.agent_id)
            if reservation is None:
                return
            self._advance(task, reservation)

    def _waiting_for_room(self) -> list[tuple[_Task, Room]]:
        waiting = [(task, task.step) for task in self._tasks if isinstance(task.step, Room)]
        return sorted(waiting, key=lambda each: (-each[0].ticket.priority, each[0].order))

    def _decode(self) -> bool:
        """One step for all agents that generate. Returns whether there was any."""
        tasks = [task for task in self._tasks if isinstance(task.step, Pass) and task.step.decode]
        if not tasks:
            return False
        begun = time.perf_counter()
        if self.batched and len(tasks) > 1:
            self._decode_rows(tasks)
        else:
            for task in tasks:
                self._run_pass(task)
        self._step_seconds = time.perf_counter() - begun
        self.figures.decode_steps += 1
        self.figures.decoded += len(tasks)
        for task in tasks:
            task.ticket.decoded += 1
        return True

    def _decode_rows(self, tasks: Sequence[_Task]) -> None:
        passes = [task.step for task in tasks if isinstance(task.step, Pass)]
        try:
            feeders = [each.feeder for each in passes]
            rows = decode_together(self.engine.model.model, feeders, [each.tokens[0] for each in passes])
        except Exception as error:
            self.figures.row_by_row_steps += 1
            if self.figures.row_by_row_steps == 1:
                self.on_fallback(error)
            for task in tasks:
                self._run_pass(task)
            return
        for task, logits in zip(tasks, rows, strict=True):
            self._advance(task, logits)

    def _prefill(self) -> bool:
        """Prefill passes, agents alternating, for as long as a decode step took. Returns whether any ran."""
        begun = time.perf_counter()
        ran = False
        while self._prefills and (not ran or time.perf_counter() - begun < self._step_seconds):
            self._run_pass(self._prefills.popleft())
            self.figures.prefill_passes += 1
            ran = True
        return ran

    def _run_pass(self, task: _Task) -> None:
        step = task.step
        assert isinstance(step, Pass)
        try:
            logits = step.run()
        except Exception as error:
            self._throw(task, error)
        else:
            self._advance(task, logits)

    def _rest(self, expecting: bool) -> bool:
        """Wait for an I/O thread or a new turn. Returns False if there is nothing to wait for."""
        if self._next:
            return True
        if not self._working and self._incoming.empty() and not self._tasks and not expecting:
            return False
        begun = time.perf_counter()
        pending: list[Future[Any]] = [*self._working, self._waker]
        wait(pending, timeout=0.05, return_when=FIRST_COMPLETED)
        if self._working:
            self.figures.idle_seconds += time.perf_counter() - begun
        if self._waker.done():
            self._waker = Future()
        return True
