"""Turns of an engine under a scheduler, as tests hand them in."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from amem_cli.engine.cache.agent_cache import footprint
from amem_cli.engine.models.registry import find
from amem_cli.engine.prompt.transcript import Text
from amem_cli.engine.turns.engine import Engine
from amem_cli.engine.turns.requests import NOBODY, ChatOptions, Generation, TurnResult, Watcher
from amem_cli.engine.turns.scheduler import Scheduler, Ticket
from amem_cli.engine.turns.steps import Steps
from kvstore.format.codecs import CODECS, DEFAULT_CODEC
from kvstore.naming import Ref
from tests.support.engine.places import Place

CODEC = CODECS[DEFAULT_CODEC]
WHOLE = 4000  # tokens: any of the tests' agents is shorter


@dataclass
class Turns:
    """An engine under a scheduler, and the turns that were handed in."""

    engine: Engine
    batched: bool = True
    tickets: list[Ticket[TurnResult]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.engine, self.batched)

    def chat(
        self,
        name: str,
        text: str = "Well?",
        tokens: int = 8,
        *,
        priority: int = 0,
        timeout: float | None = None,
        save: bool = True,
        watcher: Watcher = NOBODY,
    ) -> Ticket[TurnResult]:
        def begin(ticket: Ticket[TurnResult]) -> Steps[TurnResult]:
            watching = Watcher(
                watcher.on_text, watcher.on_progress, lambda: watcher.should_stop() or ticket.should_stop()
            )
            generation = Generation(max_tokens=tokens)
            return self.engine.chat_steps(Ref(name), [Text(text)], generation, ChatOptions(save=save), watching)

        return self._add(self.scheduler.submit(name, begin, priority, timeout))

    def prefill(self, name: str, text: str, watcher: Watcher = NOBODY) -> Ticket[TurnResult]:
        begin = partial(_begin, lambda: self.engine.prefill_steps(name, [Text(text)], watcher=watcher))
        return self._add(self.scheduler.submit(name, begin))

    def extend(self, name: str, text: str) -> Ticket[TurnResult]:
        begin = partial(_begin, lambda: self.engine.extend_steps(name, [Text(text)]))
        return self._add(self.scheduler.submit(name, begin))

    def run(self, more: Callable[[], bool] = lambda: False) -> list[TurnResult]:
        """Run all; their results in the order in which they were handed in."""
        self.scheduler.run(more)
        assert all(ticket.future.done() for ticket in self.tickets)
        tickets, self.tickets = self.tickets, []
        return [ticket.future.result() for ticket in tickets]

    def _add(self, ticket: Ticket[TurnResult]) -> Ticket[TurnResult]:
        self.tickets.append(ticket)
        return ticket


def _begin(steps: Callable[[], Steps[TurnResult]], _ticket: Ticket[TurnResult]) -> Steps[TurnResult]:
    return steps()


def turns(place: Place, model: Path, agents: float | None = None, batched: bool = True) -> Turns:
    """Turns of a model under a budget of so many agents."""
    entry = find(place.store.layout, str(model))
    engine = Engine(place.store, entry, place.root / "cache")
    if agents is not None:
        budget = int(agents * footprint(engine.spec.groups, CODEC, WHOLE))
        engine = Engine(place.store, entry, place.root / "cache", memory=budget)
    return Turns(engine, batched)
