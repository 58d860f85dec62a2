"""Turns that are interrupted on tiny models: what is committed, and how they go on."""

from collections.abc import Callable
from pathlib import Path

import pytest

from amem_cli.engine.prompt.transcript import Text
from amem_cli.engine.turns.requests import Generation, Watcher
from kvstore.errors import ConflictError
from kvstore.naming import Ref
from tests.support.engine.places import SENTENCE, SHORT, Place, kept
from tests.support.models.chat import KINDS, Kind

Tiny = Callable[[Kind], Path]


def stop_after(passes: int) -> Watcher:
    """Interrupts a turn after so many passes."""
    left = [passes]

    def should_stop() -> bool:
        left[0] -= 1
        return left[0] < 0

    return Watcher(should_stop=should_stop)


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
    assert a.previous is None and kept(a) == kept(b)
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
