"""Several agents in one step: each row is what it would be alone."""

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from amem_cli.engine.cache.decode_batch import can_batch, decode_together
from amem_cli.engine.cache.feeder import Feeder, passes
from amem_cli.engine.cache.probe import describe
from amem_cli.engine.cache.slabs import SlabPool
from amem_cli.engine.models.load import LoadedModel, load
from amem_cli.engine.models.registry import find
from kvstore.format.codecs import CODECS, DEFAULT_CODEC
from kvstore.format.layout import StoreLayout
from tests.support.models import kinds
from tests.support.models.chat import KINDS, Kind

Tiny = Callable[[Kind], Path]
# A row's keys go into bfloat16; a difference in the last bit of float32 can move one of them to its neighbour.
TOLERANCE = 0.05
LENGTHS = (10, 600, 3000)


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    cache = tmp_path_factory.mktemp("cache")
    return load(find(StoreLayout(cache), str(tiny(request.param))), cache)


@pytest.fixture(scope="module")
def filled(model: LoadedModel) -> Callable[[int], Feeder]:
    """Makes an agent of some length; the model's own, so that no test changes another's."""
    spec, pool = describe(model.model), SlabPool()
    ids = np.random.default_rng(3).integers(3, model.config["vocab_size"], max(LENGTHS)).tolist()

    def make(length: int) -> Feeder:
        feeder = Feeder(model.model, spec.new_cache(CODECS[DEFAULT_CODEC], pool))
        for n in passes(0, length, logits=False):
            feeder.feed(ids[feeder.cache.offset : feeder.cache.offset + n])
        return feeder

    return make


def test_models_on_latents_cannot_be_batched() -> None:
    model = kinds.build("deepseek_v3")
    assert not can_batch(model, describe(model))


def test_the_tiny_models_can_be_batched(model: LoadedModel) -> None:
    assert can_batch(model.model, describe(model.model))


@pytest.mark.long
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_rows_join_and_leave_at_any_step(
    model: LoadedModel, filled: Callable[[int], Feeder], data: st.DataObject
) -> None:
    """Agents of 10, 600 and 3,000 tokens, some of them in each step: each one's logits are its own."""
    together = [filled(length) for length in LENGTHS]
    alone = [filled(length) for length in LENGTHS]
    for step in range(data.draw(st.integers(3, 8))):
        rows = data.draw(st.lists(st.sampled_from(range(3)), min_size=1, max_size=3, unique=True))
        tokens = [7 + step + row for row in rows]
        logits = decode_together(model.model, [together[row] for row in rows], tokens)
        for row, token, out in zip(rows, tokens, logits, strict=True):
            expected = alone[row].feed([token], logits=True)
            assert expected is not None
            assert bool(mx.all(mx.abs(out - expected) < TOLERANCE * mx.std(expected)).item())
    assert [f.cache.offset for f in together] == [f.cache.offset for f in alone]
    assert [f.feeds for f in together] == [f.feeds for f in alone]


def test_a_row_of_one_is_the_row_alone(model: LoadedModel, filled: Callable[[int], Feeder]) -> None:
    (out,) = decode_together(model.model, [filled(70)], [5])
    expected = filled(70).feed([5], logits=True)
    assert expected is not None and mx.array_equal(out, expected)


def test_a_failed_step_leaves_the_rows_as_they_were(model: LoadedModel, filled: Callable[[int], Feeder]) -> None:
    rows = [filled(70), filled(300)]
    with pytest.raises((ValueError, RuntimeError, TypeError)):
        decode_together(model.model, rows, [5, "poison"])  # type: ignore[list-item]
    assert [row.cache.offset for row in rows] == [70, 300]
    expected = filled(70).feed([5], logits=True)
    out = rows[0].feed([5], logits=True)
    assert out is not None and expected is not None and mx.array_equal(out, expected)
