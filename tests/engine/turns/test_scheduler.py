"""Many turns in one loop: each is what it would be alone, inside the budget, and none waits for ever."""

import random
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import pytest
from safetensors import safe_open

from amem_cli.engine.prompt.transcript import Text
from amem_cli.engine.turns import scheduler
from amem_cli.engine.turns.engine import Engine
from amem_cli.engine.turns.requests import ChatOptions, Generation, TurnResult, Watcher
from amem_cli.engine.turns.scheduler import Ticket
from kvstore.errors import DamageError, UsageError
from kvstore.naming import Ref
from kvstore.store import Store
from kvstore.verify.checks import Checks
from kvstore.verify.verify import verify
from tests.support.engine.places import SENTENCE, Place, resident
from tests.support.engine.turning import turns

Tiny = Callable[[str], Path]


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
        many.engine.chat(Ref(name), [Text(" said that")], Generation(max_tokens=64), ChatOptions(save=False)).text
        for name in openings
    ]
    assert together == alone
    assert len(set(together)) == len(openings)


@pytest.mark.long
def test_two_hundred_turns_keep_memory_flat(tiny: Tiny, place: Place) -> None:
    many = turns(place, tiny("llama"), agents=3)
    for n in range(6):
        many.prefill(f"a{n}", SENTENCE)
    many.run()

    def grow(turns: int) -> int:
        for n in range(turns):
            many.chat(f"a{n % 6}", "ok", 2)
        many.run()
        return resident()

    before = grow(60)
    assert grow(200) < before + 15_000  # KiB


@pytest.mark.long
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


def test_a_turn_whose_time_is_over_commits_what_it_said(endless: Path, place: Place) -> None:
    many = turns(place, endless, agents=1.5)
    for name in ("talker", "waiter"):
        many.prefill(name, SENTENCE)
    before = {result.agent: result for result in many.run()}
    begun = time.monotonic()
    many.chat("talker", tokens=60)
    many.run()
    pace = time.monotonic() - begun
    talker = many.chat("talker", tokens=3000, timeout=10 * pace)  # enough to begin, not to end
    waiting: list[Ticket[TurnResult]] = []

    def hand_in() -> bool:
        if talker.decoded and not waiting:  # it has its room
            waiting.append(many.chat("waiter", timeout=pace))
        return not waiting

    many.scheduler.run(hand_in)
    [waiter] = waiting
    result = talker.future.result()
    assert result.finish == "interrupted" and 0 < result.generated < 3000
    assert place.state("talker").manifest.tokens == result.tokens
    assert isinstance(waiter.future.exception(), CancelledError)  # it never had room
    assert place.state("waiter").digest == before["waiter"].manifest
    assert many.engine.memory_budget.nbytes <= many.engine.agents.pool.nbytes


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


def test_a_decode_step_that_fails_runs_row_by_row_and_is_reported(
    tiny: Tiny, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, heard = ("a", "b", "c"), list[Exception]()

    def fail(*_: object) -> list[mx.array]:
        raise RuntimeError("planted")

    many = turns(place, tiny("llama"))
    for name in names:
        many.prefill(name, f"I am {name}. {SENTENCE}")
    many.run()
    alone = [
        many.engine.chat(Ref(name), [Text("Well?")], Generation(8), ChatOptions(save=False)).text for name in names
    ]
    monkeypatch.setattr(scheduler, "decode_together", fail)
    many.scheduler.on_fallback = heard.append
    for name in names:
        many.chat(name, tokens=8, save=False)
    assert [result.text for result in many.run()] == alone
    assert many.scheduler.figures.row_by_row_steps > 1
    assert [str(error) for error in heard] == ["planted"]  # the first one only
