"""Prefills: repeated, replaced, cut short, and sharing blocks in a domain."""

from collections.abc import Callable
from pathlib import Path

import pytest

from amem_cli.engine.prompt.transcript import Text
from amem_cli.engine.turns.requests import PrefillOptions, Watcher
from kvstore.errors import ConflictError
from kvstore.naming import Ref
from tests.support.models import KINDS, Kind
from tests.support.places import SENTENCE, SHORT, Place, blocks_of, comparable, stop_after

Tiny = Callable[[Kind], Path]


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
    """The block on disk goes on with the old text; what is before that is kept."""
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


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_that_was_cut_short_goes_on_and_ends_the_same(kind: Kind, tiny: Tiny, place: Place) -> None:
    engine = place.engine(tiny(kind))
    cut = engine.prefill("a", [Text(SENTENCE * 60)], watcher=stop_after(3))
    assert not cut.complete and cut.prefilled == 768
    manifest = place.state("a").manifest
    assert not manifest.complete and manifest.pending == manifest.tokens - 768
    with pytest.raises(ConflictError, match="cut short"):
        engine.chat(Ref("a"), [Text("Well?")], SHORT)
    rest = place.engine(tiny(kind)).prefill("a", [Text(SENTENCE * 60)])
    assert rest.complete and rest.reused == 768 and rest.prefilled == rest.tokens - 1 - 768
    place.engine(tiny(kind)).prefill("b", [Text(SENTENCE * 60)])
    a, b = place.state("a").manifest, place.state("b").manifest
    assert a.previous is None and comparable(a) == comparable(b)
    answers = [engine.chat(Ref(name), [Text("So?")], SHORT).text for name in "ab"]
    assert answers[0] == answers[1]


def test_a_long_prefill_commits_on_the_way(tiny: Tiny, place: Place) -> None:
    engine = place.engine(tiny("llama"), checkpoint_seconds=0.0)
    seen: list[int] = []

    def look(_: object) -> None:
        agents = place.store.agents()
        seen.append(place.state("a").manifest.cached if agents else 0)

    engine.prefill("a", [Text(SENTENCE * 120)], watcher=Watcher(on_progress=look))
    assert {0, 1024} <= set(seen)
    assert place.state("a").manifest.previous is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_domain_shares_blocks_and_only_a_domain(kind: Kind, tiny: Tiny, place: Place) -> None:
    engine = place.engine(tiny(kind), checkpoint_seconds=0.0)
    shared = SENTENCE * 80
    engine.prefill("a", [Text(shared)], PrefillOptions(domain="team"))
    mate = engine.prefill("b", [Text(shared + "But b has more to say.")], PrefillOptions(domain="team"))
    assert mate.reused >= 1024 and mate.reused % 256 == 0
    assert set(blocks_of(place, "a")) & set(blocks_of(place, "b"))
    stranger = engine.prefill("c", [Text(shared)])
    assert stranger.reused == 0
    assert not set(blocks_of(place, "a")) & set(blocks_of(place, "c"))
    alone = engine.prefill("d", [Text(shared + "But b has more to say.")])
    assert alone.reused == 0
    answers = [engine.chat(Ref(name), [Text("Go on.")], SHORT).text for name in ("b", "d")]
    assert answers[0] == answers[1]
    with pytest.raises(ConflictError, match="another domain"):
        engine.prefill("c", [Text(shared)], PrefillOptions(domain="team"))
