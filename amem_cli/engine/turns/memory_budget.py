"""Which agents are in memory: a budget in bytes that is never exceeded.

A running agent has reserved the most that it will take. An idle agent may stay, so that its next turn reads nothing;
when room is needed, the least recently used one is dropped, since its committed state is on disk. Free slabs are
dropped before any agent. A slab that several agents share counts once.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import cast

from amem_cli.engine.cache.slabs import SlabPool
from amem_cli.engine.turns.agent_state import AgentState
from amem_cli.engine.turns.steps import Room, Steps
from kvstore.errors import NoSpaceError


class Reservation:
    """Room for a running agent at its largest, until `end`."""

    def __init__(self, nbytes: int, running: set["Reservation"]) -> None:
        self.nbytes = nbytes
        self.agent: AgentState | None = None  # once it is in memory
        self._running = running
        running.add(self)

    def end(self) -> None:
        """Give the room back."""
        self._running.remove(self)


def reserve(nbytes: int, agent_id: str | None = None) -> Steps[Reservation | None]:
    """The step that waits for `Room`. Returns None where memory is not counted."""
    return cast(Reservation | None, (yield Room(nbytes, agent_id)))


class MemoryBudget:
    """The agents in memory. `budget` in bytes; None: unlimited, and `keep` idle agents stay."""

    def __init__(self, pool: SlabPool, budget: int | None = None, keep: int = 1) -> None:
        self._pool = pool
        self._budget = budget
        self._keep = keep
        self._idle: OrderedDict[str, AgentState] = OrderedDict()  # by agent id, longest unused first
        self._running: set[Reservation] = set()
        pool.limit = budget

    @property
    def nbytes(self) -> int:
        """Bytes that agents may take: the reserved ones, and those of idle agents."""
        return self._held(self._idle.values())

    def check(self, nbytes: int) -> None:
        """Raises NoSpaceError for an agent that is larger than the whole budget."""
        if self._budget is not None and nbytes > self._budget:
            raise NoSpaceError(
                f"this turn needs up to {nbytes:,} bytes of memory, and the budget is {self._budget:,}",
                "raise --memory, or ask for fewer tokens",
            )

    def reserve(self, nbytes: int, agent_id: str | None = None) -> Reservation | None:
        """Reserve room for an agent that is about to run; None if the running agents leave too little.

        The caller takes agent `agent_id` right afterwards: memory that it holds is part of that room. Raises
        NoSpaceError as `check` does.
        """
        self.check(nbytes)
        if self._budget is not None:
            if self._held(()) + nbytes > self._budget:
                return None
            own = self._idle.pop(agent_id, None) if agent_id else None
            while self.nbytes + nbytes > self._budget:
                self._drop()
            if own is not None:
                self._idle[own.agent_id] = own
        return Reservation(nbytes, self._running)

    def put(self, agent: AgentState) -> None:
        """Keep a committed agent in memory as long as there is room."""
        self._idle[agent.agent_id] = agent
        while (len(self._idle) > self._keep) if self._budget is None else (self.nbytes > self._budget):
            self._drop()

    def take(self, agent_id: str, digest: str) -> AgentState | None:
        """Remove the agent and return it if its head is `digest`. At another head it is dropped."""
        agent = self._idle.pop(agent_id, None)
        if agent is not None and agent.head != digest:
            agent.release()
            return None
        return agent

    def _drop(self) -> None:
        _, agent = self._idle.popitem(last=False)
        agent.release()

    def _held(self, idle: Iterable[AgentState]) -> int:
        """Bytes that running agents may take, and those of the agents in `idle`."""
        idle = list(idle)
        caches = [agent.feeder.cache for agent in (*(room.agent for room in self._running), *idle) if agent]
        slabs = [slab for cache in caches for slab in cache.slabs]
        repeated = sum(slab.nbytes for slab in slabs) - sum(slab.nbytes for slab in set(slabs))
        reserved = sum(room.nbytes for room in self._running)
        return reserved + sum(agent.feeder.cache.nbytes for agent in idle) - repeated
