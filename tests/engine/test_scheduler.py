"""Many turns in one loop: each is what it would be alone, inside the budget, and none waits for ever."""

import random
import resource
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from safetensors import safe_open

from amem_cli.engine.registry import find
from amem_cli.engine.results import NOBODY, Generation, TurnResult, Watcher
from amem_cli.engine.scheduler import Scheduler, Ticket
from amem_cli.engine.session import Engine
from amem_cli.engine.slab import footprint
from amem_cli.engine.steps import Pass, Room, Steps, Work
from amem_cli.engine.transcript import Text
from kvstore.errors import DamageError, NoSpaceError, UsageError
from kvstore.lifecycle import fork
from kvstore.naming import Ref
from kvstore.shapes import CODECS, DEFAULT_CODEC
from kvstore.store import Store
from kvstore.verify import Checks, verify
from tests.commands.tiny import make_tiny_model
from tests.engine.places import SENTENCE, Place

Tiny = Callable[[str], Path]
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
            return self.engine.chat_steps(Ref(name), [Text(text)], generation, save=save, watcher=watching)

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


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose answers never end by themselves."""
    return make_tiny_model(tmp_path_factory.mktemp("endless"))


def test_four_agents_say_together_what_they_say_alone(gemma: Path, place: Place) -> None:
    many = turns(place, gemma)
    openings = {
        "keeper": "The lighthouse in the north was built by a family of fishermen. Its keeper",
        "cook": "To make a good soup you need onions, carrots and a whole afternoon. My grandmother",
        "judge": "The court finds that the contract is void, for the following reasons. The seller",
        "pilot": "At thirty thousand feet the left engine caught fire. The captain",
    }
    for name, opening in openings.items():
        many.prefill(name, opening)
    many.run()
    for name in openings:
        many.chat(name, " said that", 64, save=False)
    together = [result.text for result in many.run()]
    assert many.scheduler.figures.decode_steps < 80  # four answers of 64 tokens, most of them in common steps
    alone = [
        many.engine.chat(Ref(name), [Text(" said that")], Generation(max_tokens=64), save=False).text
        for name in openings
    ]
    assert together == alone
    assert len(set(together)) == len(openings)


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


def test_a_budget_changes_no_answer_and_is_never_passed(
    tiny: Tiny, tmp_path: Path, script: list[tuple[str, str, int]]
) -> None:
    free = play(turns(Place(tmp_path / "free"), tiny("gemma3_text"), batched=False), script)
    many = turns(Place(tmp_path / "tight"), tiny("gemma3_text"), agents=3, batched=False)
    residents, pool = many.engine.residents, many.engine.conversations.pool
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
    pool, residents, tickets, together = many.engine.conversations.pool, many.engine.residents, many.tickets, 0

    def look() -> bool:
        nonlocal together
        if pool.limit is not None:
            assert residents.nbytes <= pool.limit and pool.nbytes <= pool.limit
        together = max(together, sum(ticket.decoded > 0 and not ticket.future.done() for ticket in tickets))
        return False

    return [result.text for result in many.run(look)], together


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


def test_two_hundred_turns_keep_memory_flat(tiny: Tiny, place: Place) -> None:
    many = turns(place, tiny("llama"), agents=3)
    for n in range(6):
        many.prefill(f"a{n}", SENTENCE)
    many.run()

    def grow(turns: int) -> int:
        for n in range(turns):
            many.chat(f"a{n % 6}", "ok", 2)
        many.run()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    before = grow(60)
    assert grow(200) < before + 30_000  # KiB


def test_nobody_is_lost_and_nobody_hears_another(tiny: Tiny, place: Place) -> None:
    """Sixteen agents, 64 turns, some of them cancelled; one has a damaged block, one a text that is too long."""
    many, chance = turns(place, tiny("qwen3"), agents=9), random.Random(11)
    canaries = {f"a{n}": "".join(chance.choices("bcdfghjkl", k=12)) for n in range(16)}
    for name, canary in canaries.items():
        many.prefill(name, SENTENCE + canary + SENTENCE * 20)
    many.run()
    block = next(place.store.layout.domain(place.state("a3").agent.domain).glob("blocks/*/*"))
    whole = block.read_bytes()
    block.chmod(0o600)
    block.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))

    names = [f"a{n % 16}" for n in range(64)]
    tickets = [
        many.extend(name, "x " * 40_000) if n == 21 else many.chat(name, f"{canaries[name]}?", chance.randint(1, 24))
        for n, name in enumerate(names)
    ]
    doomed = chance.sample(tickets, 12)
    rounds = 0

    def cancel_now_and_then() -> bool:
        nonlocal rounds
        rounds += 1
        if rounds % 7 == 0 and doomed:
            doomed.pop().cancel()
        return False

    many.scheduler.run(cancel_now_and_then)
    assert all(ticket.future.done() for ticket in tickets)
    errors = {n: error for n, ticket in enumerate(tickets) if (error := ticket.future.exception())}
    assert {type(error) for error in errors.values()} <= {DamageError, UsageError, CancelledError}
    assert isinstance(errors[21], UsageError)
    assert {names[n] for n, error in errors.items() if isinstance(error, DamageError)} == {"a3"}
    assert len(errors) < 20

    block.write_bytes(whole)
    block.chmod(0o400)
    said = [(names[n], ticket.future.result().text or "") for n, ticket in enumerate(tickets) if n not in errors]
    report = verify(place.store, Checks("deep"))
    assert not report.findings
    for name, canary in canaries.items():
        others = [other for other in canaries if other != name]
        assert all(canary not in text for who, text in said if who != name)
        assert canary in tokens_text(many.engine, name)
        assert all(canary not in tokens_text(many.engine, other) for other in others)
        own = block_texts(many.engine, place.store, place.state(name).agent.domain)
        assert any(canary in text for text in own)
        domains = {place.state(other).agent.domain for other in others}
        texts = [text for domain in domains for text in block_texts(many.engine, place.store, domain)]
        assert len(texts) >= len(domains) and all(canary not in text for text in texts)


def tokens_text(engine: Engine, name: str) -> str:
    """What the pages of an agent's head say."""
    return engine.model.prompt.decode(engine.store.tokens(engine.store.resolve(Ref(name)).manifest).tolist())


def block_texts(engine: Engine, store: Store, domain: str) -> list[str]:
    """What the blocks of a domain are about."""
    texts = []
    for path in store.layout.domain(domain).glob("blocks/*/*"):
        with safe_open(path, "np") as file:
            texts.append(engine.model.prompt.decode(file.get_tensor("tokens").reshape(-1).tolist()))
    return texts


def test_a_long_prefill_lets_others_speak_after_each_pass(endless: Path, place: Place) -> None:
    many = turns(place, endless)
    many.prefill("talker", SENTENCE)
    many.run()
    passes: list[int] = []  # how many had run when each token came

    def note() -> bool:
        if talker.decoded:  # its own text is read
            passes.append(many.scheduler.figures.prefill_passes)
        return False

    talker = many.chat("talker", "Well?", 40, watcher=Watcher(should_stop=note))
    # a pass takes longer than any step here: of one that is quicker, as many may run as a step takes
    slow = Watcher(on_progress=lambda _: time.sleep(0.1))
    many.prefill("reader", SENTENCE * (4200 // len(many.engine.model.prompt.encode(SENTENCE))), watcher=slow)
    results = many.run()
    between = [after - before for before, after in pairwise(passes)]
    assert max(between) == 1 and sum(between) > 10
    assert results[1].prefilled > 4096


def test_who_is_wanted_more_is_let_in_first(endless: Path, place: Place) -> None:
    many = turns(place, endless, agents=1.5)
    for name in ("first", "low", "high"):
        many.prefill(name, SENTENCE)
    many.run()
    done: list[str] = []

    def hand_in(name: str, priority: int, tokens: int) -> Ticket[TurnResult]:
        ticket = many.chat(name, tokens=tokens, priority=priority)
        ticket.future.add_done_callback(lambda _: done.append(name))
        return ticket

    first = hand_in("first", 0, 150)

    def while_it_speaks() -> bool:
        if first.decoded and len(many.tickets) == 1:
            hand_in("low", 1, 2)
            hand_in("high", 5, 2)
        return False

    many.run(while_it_speaks)
    assert done == ["first", "high", "low"]


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
    limit = many.engine.conversations.pool.limit
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
    residents, held = many.engine.residents, many.engine.residents.nbytes
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


def test_a_turn_whose_time_is_over_commits_what_it_said(endless: Path, place: Place) -> None:
    many = turns(place, endless, agents=1.5)
    for name in ("talker", "waiter"):
        many.prefill(name, SENTENCE)
    before = {result.agent: result for result in many.run()}
    talker = many.chat("talker", tokens=3000, timeout=1.0)
    waiter = many.chat("waiter", timeout=0.3)
    many.scheduler.run()
    result = talker.future.result()
    assert result.finish == "interrupted" and 0 < result.generated < 3000
    assert place.state("talker").manifest.tokens == result.tokens
    assert isinstance(waiter.future.exception(), CancelledError)  # it never had room
    assert place.state("waiter").digest == before["waiter"].manifest
    assert many.engine.residents.nbytes <= many.engine.conversations.pool.nbytes


def test_an_agents_turns_run_in_their_order_whenever_they_come(endless: Path, place: Place) -> None:
    many = turns(place, endless)
    many.prefill("a", SENTENCE)
    many.run()
    first = many.chat("a", tokens=5)
    many.chat("a", tokens=4)
    many.chat("a", tokens=3)
    first.future.add_done_callback(lambda _: many.chat("a", tokens=2))  # before the second has begun
    results = many.run()
    assert [result.generated for result in results] == [5, 4, 3, 2]
    assert [result.before for result in results[1:]] == [result.manifest for result in results[:-1]]
