"""The memory budget: it changes no answer, is never passed, and who can never fit is told."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from amem_cli.engine.cache.agent_cache import footprint
from amem_cli.engine.models.registry import find
from amem_cli.engine.prompt.transcript import Text
from amem_cli.engine.turns.engine import Engine
from amem_cli.engine.turns.requests import Generation, TurnResult
from amem_cli.engine.turns.steps import Pass, Room, Work
from kvstore.errors import NoSpaceError, UsageError
from kvstore.lifecycle import fork
from kvstore.naming import Ref
from tests.support.engine.places import SENTENCE, Place
from tests.support.engine.turning import CODEC, WHOLE, Turns, turns

Tiny = Callable[[str], Path]


@pytest.fixture
def script() -> list[tuple[str, str, int]]:
    """Fifty turns of ten agents: who, how, how long."""
    chance = random.Random(5)
    agents = [f"a{n}" for n in range(10)]
    return [(chance.choice(agents), chance.choice(("chat", "extend")), chance.randint(1, 40)) for _ in range(50)]


def play(
    many: Turns, script: Sequence[tuple[str, str, int]], more: Callable[[], bool] = lambda: False
) -> list[TurnResult]:
    for n in range(10):
        many.prefill(f"a{n}", f"I am {n}. " + SENTENCE * (n + 1))
    for name, how, length in script:
        if how == "chat":
            many.chat(name, SENTENCE[:length], min(length, 16))
        else:
            many.extend(name, SENTENCE[:length])
    return many.run(more)


@pytest.mark.long
def test_a_budget_changes_no_answer_and_is_never_passed(
    tiny: Tiny, tmp_path: Path, script: list[tuple[str, str, int]]
) -> None:
    free = play(turns(Place(tmp_path / "free"), tiny("gemma3_text"), batched=False), script)
    many = turns(Place(tmp_path / "tight"), tiny("gemma3_text"), agents=3, batched=False)
    residents, pool = many.engine.memory_budget, many.engine.agents.pool
    most = 0

    def look() -> bool:
        nonlocal most
        assert pool.limit is not None
        assert residents.nbytes <= pool.limit and pool.nbytes <= pool.limit
        most = max(most, pool.nbytes)
        return False

    tight = play(many, script, look)
    assert [result.text for result in tight] == [result.text for result in free]
    assert [result.tokens for result in tight] == [result.tokens for result in free]
    assert most > 2 * footprint(many.engine.spec.groups, CODEC, WHOLE)  # three at once, and the tenth had to wait
    known: dict[str, int] = {}
    for result in tight:
        assert result.reused == known.get(result.agent, 0)
        assert result.reused + result.prefilled + max(result.generated, 1) == result.tokens
        known[result.agent] = result.tokens - 1


def twice_each(many: Turns, names: Sequence[str]) -> tuple[list[str | None], int]:
    """What agents say in two turns each, and how many spoke at the same time. No budget is passed."""
    for n, name in enumerate((*names, *names)):
        many.chat(name, f"I say {n}.", 16)
    pool, residents, tickets, together = many.engine.agents.pool, many.engine.memory_budget, many.tickets, 0

    def look() -> bool:
        nonlocal together
        if pool.limit is not None:
            assert residents.nbytes <= pool.limit and pool.nbytes <= pool.limit
        together = max(together, sum(ticket.decoded > 0 and not ticket.future.done() for ticket in tickets))
        return False

    return [result.text for result in many.run(look)], together


@pytest.mark.long
def test_forks_share_a_budget(endless: Path, place: Place) -> None:
    """Three run at once where two of their size would fit, and say what they say with all the memory there is."""
    free = turns(place, endless, batched=False)
    parent = free.engine.prefill("f0", [Text(SENTENCE * (4500 // len(SENTENCE)))])
    names = [f"f{n}" for n in range(6)]
    for name in (*names[1:], *(f"again{n}" for n in range(6))):
        fork(place.store, Ref("f0"), name)
    size = footprint(free.engine.spec.groups, CODEC, parent.tokens + 200)
    entry = find(place.store.layout, str(endless))
    tight = Turns(Engine(place.store, entry, place.root / "cache", memory=int(2.7 * size)), batched=False)
    said, together = twice_each(tight, names)
    assert together == 3
    assert len(set(said)) > 2
    assert twice_each(free, [f"again{n}" for n in range(6)])[0] == said


def test_a_text_beyond_the_context_is_that_in_a_small_budget_too(endless: Path, place: Place) -> None:
    many = turns(place, endless, agents=1.5)
    many.prefill("a", SENTENCE)
    many.run()
    limit = many.engine.model.context_length
    assert limit is not None and footprint(many.engine.spec.groups, CODEC, limit) > 2 * footprint(
        many.engine.spec.groups, CODEC, WHOLE
    )
    before, too_long = place.state("a").digest, SENTENCE * (limit // 70)
    refused = many.extend("a", too_long), many.chat("a", too_long), many.prefill("b", too_long)
    fits_not = many.chat("a", SENTENCE, limit)
    many.scheduler.run()
    for ticket in refused:
        error = ticket.future.exception()
        assert isinstance(error, UsageError) and error.exit_code == 2 and f"ends at {limit}" in error.message
    assert isinstance(fits_not.future.exception(), NoSpaceError)  # an answer may be shorter than it is let to be
    assert place.state("a").digest == before


def test_a_turn_that_can_never_fit_is_refused_at_once(endless: Path, place: Place) -> None:
    many = turns(place, endless, agents=1.5)
    for name in ("first", "second", "third"):
        many.prefill(name, SENTENCE)
    many.run()
    first, second = many.chat("first", tokens=100), many.chat("second", tokens=100)
    third = many.chat("third", tokens=20_000, priority=-1)
    when: list[int] = []
    third.future.add_done_callback(lambda _: when.append(first.decoded))
    many.scheduler.run()
    error = third.future.exception()
    assert isinstance(error, NoSpaceError) and error.exit_code == 13
    limit = many.engine.agents.pool.limit
    assert (
        f"{limit:,}" in error.message and f"{footprint(many.engine.spec.groups, CODEC, 20_000):,}"[:4] in error.message
    )
    assert when[0] < 99
    assert [ticket.future.result().generated for ticket in (first, second)] == [100, 100]


def test_an_agent_that_waits_for_room_is_counted(endless: Path, place: Place) -> None:
    """It stays in memory while it can, and belongs to the room that it is given."""
    many = turns(place, endless, agents=1.5)
    many.prefill("a", SENTENCE)
    many.chat("a")
    many.run()
    residents, held = many.engine.memory_budget, many.engine.memory_budget.nbytes
    assert held > 0
    steps = many.engine.chat_steps(Ref("a"), [Text("Well?")], Generation(4))
    step = next(steps)
    while not isinstance(step, Room):
        assert isinstance(step, Work)
        step = steps.send(step.run())
    assert residents.nbytes == held
    reservation = residents.reserve(step.nbytes, step.agent_id)
    assert reservation is not None
    step = steps.send(reservation)
    assert isinstance(step, Pass)  # nothing is read again
    assert residents.nbytes < 2 * held
    steps.close()
    assert residents.nbytes == 0
