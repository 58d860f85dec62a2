"""Turns on tiny models: what is resumed, fed, committed and refused."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from amem_cli.engine.prompt.transcript import Text
from amem_cli.engine.turns.requests import ChatOptions, ExtendOptions, Generation, PrefillOptions, Watcher
from kvstore import lifecycle
from kvstore.errors import ConflictError, NotFoundError, UsageError
from kvstore.format.document import replace
from kvstore.naming import Ref
from tests.support.models import KINDS, Kind
from tests.support.places import SENTENCE, SHORT, Place, blocks_of, comparable, resident, stop_after

Tiny = Callable[[Kind], Path]


@pytest.mark.parametrize("kind", KINDS)
def test_answer_in_a_new_engine_is_the_one_of_the_old(kind: Kind, tiny: Tiny, place: Place) -> None:
    first = place.engine(tiny(kind))
    first.prefill("a", [Text(SENTENCE * 20)])
    lifecycle.fork(place.store, Ref("a"), "b")
    one = first.chat(Ref("a"), [Text("And then?")], SHORT)
    two = first.chat(Ref("a"), [Text("Why?")], SHORT)  # goes on in memory
    other = place.engine(tiny(kind)).chat(Ref("b"), [Text("And then?")], SHORT)
    again = place.engine(tiny(kind)).chat(Ref("b"), [Text("Why?")], SHORT)  # goes on from the store
    assert (one.text, two.text) == (other.text, again.text)
    assert one.reused == place.state("a~2").manifest.cached > 256
    assert one.prefilled == one.tokens - one.generated - one.reused
    assert comparable(place.state("a").manifest).feeds == comparable(place.state("b").manifest).feeds
    assert (
        place.store.tokens(place.state("a").manifest).tolist() == place.store.tokens(place.state("b").manifest).tolist()
    )


def test_last_token_is_never_in_the_cache(tiny: Tiny, place: Place) -> None:
    engine = place.engine(tiny("llama"))
    engine.prefill("a", [Text(SENTENCE)])
    for message in ("Yes?", "No?"):
        assert place.state("a").manifest.pending == 1
        engine.chat(Ref("a"), [Text(message)], SHORT)
    manifest = place.state("a").manifest
    assert manifest.pending == 1
    assert sum(length * count for length, count in manifest.feeds) == manifest.cached


def test_the_same_prompt_twice(tiny: Tiny, place: Place) -> None:
    """An exact hit still feeds its last token, once: the second answer equals the first."""
    engine = place.engine(tiny("qwen3"))
    engine.prefill("a", [Text(SENTENCE * 10)], PrefillOptions(domain="d"))
    engine.prefill("b", [Text(SENTENCE * 10)], PrefillOptions(domain="d"))
    assert place.state("a").manifest.cached == place.state("b").manifest.cached
    assert blocks_of(place, "a") == blocks_of(place, "b")
    answers = [engine.chat(Ref(name), [Text("Go on.")], SHORT) for name in ("a", "b")]
    assert answers[0].text == answers[1].text and answers[0].tokens == answers[1].tokens


def test_stopped_before_its_first_token_a_turn_did_not_happen(tiny: Tiny, place: Place) -> None:
    engine = place.engine(tiny("llama"))
    engine.prefill("a", [Text(SENTENCE)])
    head = place.state("a").digest
    result = engine.chat(Ref("a"), [Text(SENTENCE * 30)], SHORT, watcher=stop_after(1))
    assert (result.finish, result.generated, result.manifest) == ("interrupted", 0, None)
    assert place.state("a").digest == head
    assert engine.chat(Ref("a"), [Text("Well?")], SHORT).before == head


def test_stopped_later_what_was_said_is_committed(tiny: Tiny, place: Place) -> None:
    engine = place.engine(tiny("llama"))
    engine.prefill("a", [Text(SENTENCE)])
    heard: list[str] = []
    watcher = Watcher(on_text=heard.append, should_stop=lambda: len(heard) >= 3)
    result = engine.chat(Ref("a"), [Text("Well?")], Generation(max_tokens=500), watcher=watcher)
    assert result.finish == "interrupted" and 3 <= result.generated < 20 and "".join(heard) == result.text
    manifest = place.state("a").manifest
    assert manifest.stop == "interrupted" and manifest.owed == tuple(engine.model.prompt.turn_end("assistant"))
    # the closing tokens are fed before what comes next
    engine.chat(Ref("a"), [Text("And?")], SHORT)
    tokens = place.store.tokens(place.state("a").manifest).tolist()
    owed = list(manifest.owed)
    assert tokens[manifest.tokens : manifest.tokens + len(owed)] == owed


def test_no_save_leaves_no_trace_and_answers_the_same(tiny: Tiny, place: Place) -> None:
    engine = place.engine(tiny("qwen3"))
    engine.prefill("a", [Text(SENTENCE * 5)])
    before = place.files()
    quiet = engine.chat(Ref("a"), [Text("Well?")], SHORT, ChatOptions(save=False))
    assert quiet.manifest is None and place.files() == before
    assert engine.chat(Ref("a"), [Text("Well?")], SHORT).text == quiet.text
    assert engine.chat(Ref("a", back=1), [Text("Well?")], SHORT, ChatOptions(save=False)).text == quiet.text


def test_only_a_head_goes_on(tiny: Tiny, place: Place) -> None:
    engine = place.engine(tiny("llama"))
    engine.prefill("a", [Text(SENTENCE)])
    lifecycle.snapshot(place.store, Ref("a"), "s")
    with pytest.raises(UsageError, match="not the head"):
        engine.chat(Ref("a", snapshot="s"), [Text("Well?")], SHORT)
    with pytest.raises(NotFoundError):
        engine.chat(Ref("b"), [Text("Well?")], SHORT)


def test_expected_head(tiny: Tiny, place: Place) -> None:
    engine = place.engine(tiny("llama"))
    engine.prefill("a", [Text(SENTENCE)])
    head = place.state("a").digest
    assert engine.chat(Ref("a"), [Text("Well?")], SHORT, ChatOptions(expect=head[:12])).before == head
    with pytest.raises(ConflictError, match="has moved"):
        engine.chat(Ref("a"), [Text("Well?")], SHORT, ChatOptions(expect=head[:12]))
    with pytest.raises(ConflictError, match="has moved"):
        engine.extend("a", [Text("Well?")], ExtendOptions(expect=head[:12]))


def test_stop_string_and_length(tiny: Tiny, place: Place) -> None:
    engine = place.engine(tiny("llama"))
    engine.prefill("a", [Text(SENTENCE)])
    long = engine.chat(Ref("a"), [Text("Well?")], Generation(max_tokens=30), ChatOptions(save=False))
    assert long.finish == "length" and long.generated == 30 and long.text
    stop = long.text[4:6]
    cut = engine.chat(Ref("a"), [Text("Well?")], Generation(max_tokens=30, stop=(stop,)))
    assert cut.finish == "stop" and cut.text == long.text[: long.text.index(stop)]


def test_seed_repeats_a_sampled_answer(tiny: Tiny, place: Place) -> None:
    engine = place.engine(tiny("llama"))
    engine.prefill("a", [Text(SENTENCE)])

    def ask(seed: int | None) -> tuple[str | None, int | None]:
        result = engine.chat(
            Ref("a"), [Text("Well?")], Generation(max_tokens=20, temp=1.5, seed=seed), ChatOptions(save=False)
        )
        return result.text, result.seed

    drawn, seed = ask(None)
    assert ask(seed) == (drawn, seed)
    assert ask(seed + 1 if seed is not None else 0)[0] != drawn


def test_extend_adds_context_that_the_answer_sees(tiny: Tiny, place: Place) -> None:
    engine = place.engine(tiny("gemma3_text"))
    engine.prefill("a", [Text(SENTENCE * 3)])
    lifecycle.fork(place.store, Ref("a"), "b")
    cached = place.state("a").manifest.cached
    result = engine.extend("a", [Text("A new fact.", label="phase-2")])
    assert result.reused == cached and result.prefilled == result.tokens - 1 - cached and result.generated == 0
    manifest = place.state("a").manifest
    assert manifest.op == "extend" and manifest.turns[-1].label == "phase-2"
    extended = engine.chat(Ref("a"), [Text("Well?")], SHORT)
    at_once = engine.chat(Ref("b"), [Text("A new fact."), Text("Well?")], SHORT)
    assert extended.tokens == at_once.tokens and extended.text == at_once.text


def test_evicted_agent_prefills_again_in_the_same_passes(tiny: Tiny, place: Place) -> None:
    engine = place.engine(tiny("gemma3_text"))
    for name in ("a", "b"):
        engine.prefill(name, [Text(SENTENCE * 20)])
        engine.chat(Ref(name), [Text("Well?")], SHORT)
    state = place.state("a")
    with place.store.hold("a", 0) as hold, place.store.transaction(place.store.domain(state.agent.domain)) as txn:
        empty = [replace(page, blocks=()) for page in place.store.pages(state.manifest)]
        pages = tuple(txn.put_page(page) for page in empty)
        evicted = replace(state.manifest, op="evict", cached=0, pages=pages, window_blocks=(), tail=None)
        txn.commit(hold, replace(evicted, previous=state.digest), state.digest)
    back = place.engine(tiny("gemma3_text")).chat(Ref("a"), [Text("And?")], SHORT)
    other = engine.chat(Ref("b"), [Text("And?")], SHORT)
    assert back.text == other.text and back.recomputed and not other.recomputed
    assert back.reused == 0 and back.prefilled == other.reused + other.prefilled
    assert place.state("a").manifest.feeds == place.state("b").manifest.feeds


def test_two_hundred_extends_keep_memory_flat(tiny: Tiny, place: Place) -> None:
    engine = place.engine(tiny("llama"))
    engine.prefill("a", [Text(SENTENCE)])

    def grow(turns: int) -> int:
        for _ in range(turns):
            engine.extend("a", [Text("ok")])
        return resident()

    before = grow(40)
    assert grow(200) < before + 15_000  # KiB
    assert np.all(place.store.tokens(place.state("a").manifest) >= 0)
