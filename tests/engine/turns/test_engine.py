"""Turns on tiny models: what is resumed, fed, committed and refused."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from amem_cli.engine.prompt.transcript import Text
from amem_cli.engine.turns.requests import ChatOptions, ExtendOptions, Generation, PrefillOptions
from kvstore import lifecycle
from kvstore.errors import ConflictError, NotFoundError, UsageError
from kvstore.format.document import replace
from kvstore.naming import Ref
from tests.support.engine.places import SENTENCE, SHORT, Place, kept, resident
from tests.support.models.chat import KINDS, Kind

Tiny = Callable[[Kind], Path]


def blocks(place: Place, ref: str) -> list[tuple[str, int, str]]:
    return sorted((row.group, row.position, row.sha256) for row in place.store.blocks(place.state(ref).manifest))


@pytest.mark.parametrize("kind", KINDS)
def test_answer_in_a_new_engine_is_the_one_of_the_old(kind: Kind, tiny: Tiny, place: Place) -> None:
    first = place.engine(tiny(kind))
    first.prefill("a", [Text(SENTENCE * 20)])
    lifecycle.fork(place.store, Ref("a"), "b")
    one = first.chat(Ref("a"), [Text("And then?")], SHORT)
    two = first.chat(Ref("a"), [Text("Why?")], SHORT)  # continues in memory
    other = place.engine(tiny(kind)).chat(Ref("b"), [Text("And then?")], SHORT)
    again = place.engine(tiny(kind)).chat(Ref("b"), [Text("Why?")], SHORT)  # continues from the store
    assert (one.text, two.text) == (other.text, again.text)
    assert one.reused == place.state("a~2").manifest.cached > 256
    assert one.prefilled == one.tokens - one.generated - one.reused
    assert kept(place.state("a").manifest).feeds == kept(place.state("b").manifest).feeds
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
    assert blocks(place, "a") == blocks(place, "b")
    answers = [engine.chat(Ref(name), [Text("Go on.")], SHORT) for name in ("a", "b")]
    assert answers[0].text == answers[1].text and answers[0].tokens == answers[1].tokens


def test_same_prefill_again_changes_nothing(tiny: Tiny, place: Place) -> None:
    engine = place.engine(tiny("llama"))
    first = engine.prefill("a", [Text(SENTENCE)])
    assert first.changed and first.reused == 0
    before = place.files()
    again = engine.prefill("a", [Text(SENTENCE)])
    assert not again.changed and again.prefilled == 0 and again.manifest == first.manifest
    engine.chat(Ref("a"), [Text("Well?")], SHORT)
    assert not engine.prefill("a", [Text(SENTENCE)]).changed
    assert before.keys() <= place.files().keys()


def test_other_text_is_a_conflict_and_a_mere_beginning_too(tiny: Tiny, place: Place) -> None:
    engine = place.engine(tiny("llama"))
    engine.prefill("a", [Text(SENTENCE)])
    head = place.state("a").digest
    for text in (SENTENCE + "More.", SENTENCE[:20], "Other"):
        with pytest.raises(ConflictError, match="another text"):
            engine.prefill("a", [Text(text)])
    assert place.state("a").digest == head


@pytest.mark.parametrize("kind", KINDS)
def test_replace_keeps_what_both_texts_have_in_common(kind: Kind, tiny: Tiny, place: Place) -> None:
    engine = place.engine(tiny(kind))
    engine.prefill("a", [Text(SENTENCE * 12)])
    engine.prefill("b", [Text(SENTENCE * 12)])
    old = place.state("a")
    result = engine.prefill("a", [Text(SENTENCE * 11 + "It rained on the sea instead.")], PrefillOptions(replace=True))
    assert result.parted_at is not None and 200 < result.parted_at < old.manifest.tokens
    full_only = kind != "gemma3_text"
    assert result.reused == (result.parted_at // 64 * 64 if full_only else 256)
    assert place.state("a~1").digest == old.digest
    fresh = place.engine(tiny(kind)).prefill("c", [Text(SENTENCE * 11 + "It rained on the sea instead.")])
    assert fresh.tokens == result.tokens
    # what is kept was computed in other passes, so the bits may differ, and the answer does not
    answers = [engine.chat(Ref(name), [Text("Go on.")], SHORT).text for name in ("a", "c")]
    assert answers[0] == answers[1]


def test_replace_parts_inside_a_full_block(tiny: Tiny, place: Place) -> None:
    """The block on disk continues with the old text; what precedes it is kept."""
    engine, text = place.engine(tiny("llama")), SENTENCE * 40 + "Then it rained."
    before = engine.prefill("a", [Text(SENTENCE * 60)])
    result = engine.prefill("a", [Text(text)], PrefillOptions(replace=True))
    assert result.parted_at is not None and result.parted_at % 256 > 64
    assert result.parted_at + 256 < before.tokens
    assert result.reused == result.parted_at // 64 * 64
    engine.prefill("b", [Text(text)])
    answers = [engine.chat(Ref(name), [Text("Go on.")], SHORT).text for name in ("a", "b")]
    assert answers[0] == answers[1]


def test_replace_takes_the_domain_s_prefix_where_that_is_longer(tiny: Tiny, place: Place) -> None:
    engine = place.engine(tiny("gemma3_text"), checkpoint_seconds=0.0)
    engine.prefill("a", [Text(SENTENCE * 12)], PrefillOptions(domain="team"))
    engine.prefill("b", [Text(SENTENCE * 80)], PrefillOptions(domain="team"))
    own = place.state("a").manifest.cached
    result = engine.prefill("a", [Text(SENTENCE * 80 + "More.")], PrefillOptions(replace=True))
    assert result.reused >= 1024 > own


def test_replace_goes_back_to_an_earlier_state_of_its_own(tiny: Tiny, place: Place) -> None:
    """A window layer cannot be cut anywhere, but at a state that was committed it can be taken up."""
    engine = place.engine(tiny("gemma3_text"))
    engine.prefill("a", [Text(SENTENCE * 12)])
    engine.chat(Ref("a"), [Text("A thinking answer, please.")], SHORT)
    result = engine.prefill("a", [Text(SENTENCE * 12), Text("Another question.")], PrefillOptions(replace=True))
    assert result.reused == place.state("a~2").manifest.cached


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


@pytest.mark.parametrize("kind", KINDS)
def test_a_domain_shares_blocks_and_only_a_domain(kind: Kind, tiny: Tiny, place: Place) -> None:
    engine = place.engine(tiny(kind), checkpoint_seconds=0.0)
    shared = SENTENCE * 80
    engine.prefill("a", [Text(shared)], PrefillOptions(domain="team"))
    mate = engine.prefill("b", [Text(shared + "But b has more to say.")], PrefillOptions(domain="team"))
    assert mate.reused >= 1024 and mate.reused % 256 == 0
    assert set(blocks(place, "a")) & set(blocks(place, "b"))
    stranger = engine.prefill("c", [Text(shared)])
    assert stranger.reused == 0
    assert not set(blocks(place, "a")) & set(blocks(place, "c"))
    alone = engine.prefill("d", [Text(shared + "But b has more to say.")])
    assert alone.reused == 0
    answers = [engine.chat(Ref(name), [Text("Go on.")], SHORT).text for name in ("b", "d")]
    assert answers[0] == answers[1]
    with pytest.raises(ConflictError, match="another domain"):
        engine.prefill("c", [Text(shared)], PrefillOptions(domain="team"))


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


@pytest.mark.long
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
