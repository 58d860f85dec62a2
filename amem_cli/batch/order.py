"""The order of requests: one runs when the requests it names are done and earlier ones of its agent have ended.

Requests of one agent run in line order, and a fork after the earlier requests of its source. `after` and `text_of`
name requests to wait for, which may be on later lines. If one of those fails, the request is skipped. An earlier
request of the same agent only keeps the order: its failure skips nothing. A cycle fails as soon as its last line is
read, and at the end of the file a request fails if it names an id that no line has. So no request waits forever.
"""

from collections import defaultdict, deque
from dataclasses import dataclass

from amem_cli.batch.requests import Request
from kvstore.errors import UsageError
from kvstore.naming import file_name


@dataclass(frozen=True)
class Dropped:
    """A request that never runs: because of `error`, or skipped because the request with the id `failed` failed."""

    request: Request
    error: UsageError | None = None
    failed: str | None = None


@dataclass
class _Waiting:
    request: Request
    needs: set[str]  # ids of unfinished requests, including earlier ones of the agent


class Order:
    """All requests of a run. The caller takes requests from `ready` and `dropped`."""

    def __init__(self) -> None:
        self.ready: deque[Request] = deque()
        self.dropped: deque[Dropped] = deque()
        self._waiting: dict[str, _Waiting] = {}
        self._waited_for: dict[str, list[str]] = defaultdict(list)  # id → ids of the requests that wait for it
        self._known: dict[str, bool | None] = {}  # id → whether it succeeded; None: not finished
        self._last: dict[str, str] = {}  # agent → id of its latest request

    def add(self, request: Request) -> None:
        """Add the request of the next line. Raises UsageError for a duplicate id."""
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
        elif cycle := self._cycle(request.id):
            members = [self._waiting[key].request for key in cycle]
            hint = "requests of an agent run in line order, so none may wait for a later one"
            self._drop([Dropped(m, UsageError(f"{m.id!r} waits for itself", hint)) for m in members])
        else:
            self._try(request.id)

    def add_failed(self, key: str) -> None:
        """Add the id of a line that is not a valid request. Raises UsageError for a duplicate id."""
        self._claim(key)
        self.settle(key, done=False)

    def settle(self, key: str, *, done: bool) -> None:
        """Record that a request has ended, and whether it succeeded."""
        ended = deque([(key, done)])
        while ended:
            key, done = ended.popleft()
            self._known[key] = done
            for waiter in self._waited_for.pop(key, ()):
                waiting = self._waiting.get(waiter)
                if waiting is None:
                    continue
                waiting.needs.discard(key)
                if not done and key in waiting.request.needs:
                    self.dropped.append(Dropped(self._waiting.pop(waiter).request, failed=key))
                    ended.append((waiter, False))
                else:
                    self._try(waiter)

    def close(self) -> None:
        """Record the end of the file: requests that wait for an id that no line has fail."""
        for key, waiting in list(self._waiting.items()):
            missing = next((need for need in waiting.request.needs if need not in self._known), None)
            if missing is not None and key in self._waiting:
                self._drop(
                    [Dropped(waiting.request, UsageError(f"{key!r} waits for {missing!r}, but no line has that id"))]
                )

    def give_up(self) -> list[Request]:
        """Remove and return all requests that have not started, in line order."""
        left = [*self.ready, *(waiting.request for waiting in self._waiting.values())]
        self.ready.clear()
        self._waiting.clear()
        return sorted(left, key=lambda request: request.line)

    def _claim(self, key: str) -> None:
        if key in self._known:
            raise UsageError("duplicate id: an earlier line has it", "give each line its own id")
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

    def _cycle(self, start: str) -> list[str]:
        """The ids on a path from `start` through what each waits for back to `start`; empty if there is none."""
        came_from: dict[str, str] = {}
        left = [start] if start in self._waited_for else []
        while left:
            here = left.pop()
            for need in self._waiting[here].needs:
                if need == start:
                    path = [here]
                    while path[-1] != start:
                        path.append(came_from[path[-1]])
                    return path
                if need in self._waiting and need not in came_from:
                    came_from[need] = here
                    left.append(need)
        return []
