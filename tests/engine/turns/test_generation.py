"""Passes, sampling and stop strings."""

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from amem_cli.engine.cache.feeder import LAST_ALONE, passes
from amem_cli.engine.turns.generation import StopStrings, sample
from kvstore.format.feeds import add_feed, cut_feeds
from kvstore.format.manifest import Sampling


@given(st.integers(0, 2000), st.integers(0, 2000), st.booleans())
def test_passes_take_all_tokens_and_never_cross_a_block(start: int, tokens: int, logits: bool) -> None:
    at = start
    lengths = list(passes(start, tokens, logits))
    for length in lengths:
        assert length > 0 and at // 256 == (at + length - 1) // 256
        at += length
    assert at == start + tokens
    if logits and lengths:
        assert lengths[-1] <= LAST_ALONE


@given(st.integers(0, 700), st.integers(0, 700), st.integers(1, 700))
def test_boundaries_do_not_depend_on_where_the_run_began(start: int, first: int, second: int) -> None:
    """A prefill stopped after any pass continues with the passes that it would have made."""
    whole = list(passes(start, first + second, logits=False))
    done = whole[: len(whole) // 2]
    assert done + list(passes(start + sum(done), first + second - sum(done), logits=False)) == whole


def test_a_short_message_is_one_pass() -> None:
    assert list(passes(4096, 2, logits=True)) == [2]
    assert list(passes(4100, LAST_ALONE, logits=True)) == [LAST_ALONE]
    assert list(passes(4100, 40, logits=True)) == [39, 1]


def test_sampling_is_a_function_of_seed_and_position() -> None:
    logits = mx.random.normal((500,))
    warm = Sampling(7, 1.0, 1.0)
    first = [sample(logits, warm, position) for position in range(40)]
    mx.random.seed(99)
    assert [sample(logits, warm, position) for position in range(40)] == first
    assert len(set(first)) > 10
    assert [sample(logits, Sampling(8, 1.0, 1.0), position) for position in range(40)] != first


def test_temperature_zero_takes_the_likeliest() -> None:
    assert sample(mx.array([0.0, 3.0, 2.9]), Sampling(1, 0.0, 1.0), 5) == 1


def test_top_p_leaves_the_nucleus() -> None:
    logits = mx.log(mx.array([0.5, 0.3, 0.15, 0.05]))
    drawn = {sample(logits, Sampling(3, 1.0, 0.7), position) for position in range(200)}
    assert drawn == {0, 1}


def test_sampled_frequencies_follow_the_probabilities() -> None:
    logits = mx.log(mx.array([0.6, 0.3, 0.1]))
    drawn = [sample(logits, Sampling(11, 1.0, 1.0), position) for position in range(2000)]
    assert [drawn.count(token) / 2000 for token in range(3)] == pytest.approx([0.6, 0.3, 0.1], abs=0.05)


@given(st.lists(st.text("abc", max_size=4), max_size=8), st.lists(st.text("abc", min_size=1, max_size=3), max_size=3))
def test_stop_strings_pass_on_all_that_stands_before_the_first(pieces: list[str], strings: list[str]) -> None:
    heard: list[str] = []
    stops = StopStrings(strings, heard.append)
    for piece in pieces:
        stops.add(piece)
    stops.finish()
    whole = "".join(pieces)
    places = [at for s in strings if (at := whole.find(s)) >= 0]
    assert stops.found == bool(places)
    assert all(heard)
    assert "".join(heard) == stops.emitted
    if places:
        assert whole.startswith(stops.emitted) and not any(s in stops.emitted for s in strings)
    else:
        assert stops.emitted == whole


def test_a_stop_string_across_pieces_is_never_shown() -> None:
    heard: list[str] = []
    stops = StopStrings(["\n\n"], heard.append)
    stops.add("one\n")
    assert heard == ["one"]
    stops.add("two\n")
    assert heard == ["one", "\ntwo"]
    stops.add("\nthree")
    stops.finish()
    assert stops.found and stops.emitted == "one\ntwo"


@given(st.lists(st.integers(1, 5), max_size=30), st.integers(0, 60))
def test_feeds_are_run_lengths_and_can_be_cut(lengths: list[int], position: int) -> None:
    feeds: tuple[tuple[int, int], ...] = ()
    for length in lengths:
        feeds = add_feed(feeds, length)
    assert [length for length, count in feeds for _ in range(count)] == lengths
    kept = [length for length, count in cut_feeds(feeds, position) for _ in range(count)]
    assert sum(kept) == min(position, sum(lengths))
    assert kept[:-1] == lengths[: max(len(kept) - 1, 0)]
