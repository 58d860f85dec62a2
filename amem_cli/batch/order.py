"""Which request may run: those that it names are done, and the agent's earlier ones are over.

An agent's requests run in the order of their lines, a fork after the earlier ones of the agent that it is made from,
and `after` and `text_of` make one wait for others, for later lines as well. What waits for a failure is skipped; for
an earlier request of its agent it waits only to keep the order, whatever becomes of that. A circle fails whole as
soon as its last line has come, and at the end of the file fails what still waits for an id that never came: so
nothing waits for ever.
"""

from collections import defaultdict, deque
from dataclasses import dataclass

from amem_cli.batch.requests import Request
from kvstore.errors import UsageError
from kvstore.naming import file_name


@dataclass(frozen=True)
class Dropped:
    """A request that never runs: `error` says why, or it is skipped since the request `failed` has failed."""

    request: Request
    error: UsageError | None = None
    failed: str | None = None


@dataclass
class _Waiting:
    request: Request
    needs: set[str]  # ids that are not over; earlier requests of the agent among them


class Order:
    """All requests of a run. `ready` and `dropped` are for the caller to take from."""

    def __init__(self) -> None:
        self.ready: deque[Request] = deque()
        self.dropped: deque[Dropped] = deque()
        self._waiting: dict[str, _Waiting] = {}
        self._waited_for: dict[str, list[str]] = defaultdict(list)  # id → ids of those that wait for it
        self._known: dict[str, bool | None] = {}  # id → whether it is done well; None: it is not over
        self._last: dict[str, str] = {}  # agent → id of its latest request

    def add(self, request: Request) -> None:
        """Take the next line. Raises UsageError for an id that there is."""
        self._claim(request.id)
        needs = {need for need in request.needs if not self._known.get(need)}
        for ref in filter(None, (request.agent, request.fork_from)):
            previous = self._last.get(file_name(ref.agent))
            if previous is not None and self._known[previous] is None:
                needs.add(previous)
        self._last[file_name(request.agent.agent)] = request.id
        self._waiting[request.id] = _Waiting(request, needs)
        for need in needs:
            self._waited_for[need].append(request.id)
        if failed := next((need for need in request.needs if self._known.get(need) is False), None):
            self._drop([Dropped(request, failed=failed)])
        elif circle := self._circle(request.id):
            members = [self._waiting[key].request for key in circle]
            hint = "an agent's lines run in their order: none may wait for a later one, nor any for what waits for it"
            self._drop([Dropped(m, UsageError(f"{m.id!r} waits for itself", hint)) for m in members])
        else:
            self._try(request.id)

    def add_failed(self, key: str) -> None:
        """Take a line that is no request, but has an id. Raises UsageError for an id that there is."""
        self._claim(key)
        self.settle(key, done=False)

    def settle(self, key: str, *, done: bool) -> None:
        """Say that a request is over."""
        over = deque([(key, done)])
        while over:
            key, done = over.popleft()
            self._known[key] = done
            for waiter in self._waited_for.pop(key, ()):
                waiting = self._waiting.get(waiter)
                if waiting is None:
                    continue
                waiting.needs.discard(key)
                if not done and key in waiting.request.needs:
                    self.dropped.append(Dropped(self._waiting.pop(waiter).request, failed=key))
                    over.append((waiter, False))
                else:
                    self._try(waiter)

    def close(self) -> None:
        """Say that no line follows."""
        for key, waiting in list(self._waiting.items()):
            missing = next((need for need in waiting.request.needs if need not in self._known), None)
            if missing is not None and key in self._waiting:
                self._drop([Dropped(waiting.request, UsageError(f"{key!r} waits for {missing!r}, which no line is"))])

    def give_up(self) -> list[Request]:
        """All that have not begun, in the order of their lines; none of them ever will."""
        left = [*self.ready, *(waiting.request for waiting in self._waiting.values())]
        self.ready.clear()
        self._waiting.clear()
        return sorted(left, key=lambda request: request.line)

    def _claim(self, key: str) -> None:
        if key in self._known:
            raise UsageError("an earlier line has this id", "give each line an id of its own")
        self._known[key] = None

    def _try(self, key: str) -> None:
        if not self._waiting[key].needs:
            self.ready.append(self._waiting.pop(key).request)

    def _drop(self, dropped: list[Dropped]) -> None:
        for each in dropped:
            del self._waiting[each.request.id]
        self.dropped.extend(dropped)
        for each in dropped:
            self.settle(each.request.id, done=False)

    def _circle(self, start: str) -> list[str]:
        """The ids on a way from `start`, over what it waits for, back to it; none where there is no such way."""
        came_from: dict[str, str] = {}
        left = [start] if start in self._waited_for else []
        while left:
            here = left.pop()
            for need in self._waiting[here].needs:
                if need == start:
                    way = [here]
                    while way[-1] != start:
                        way.append(came_from[way[-1]])
                    return way
                if need in self._waiting and need not in came_from:
                    came_from[need] = here
                    left.append(need)
        return []
