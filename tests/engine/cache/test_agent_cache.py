"""The cache: what goes in comes out, what a window drops stays out, and only the host writes."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache

from amem_cli.engine.cache.attention_caches import FullCache, ring_blocks
from amem_cli.engine.cache.slabs import SlabPool
from kvstore.format.codecs import CODECS
from kvstore.format.layers import quantized_parts
from tests.support.engine.caches import fill, held, layer_group, passes_of


@pytest.mark.parametrize("window", [None, 64, 512])
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 256, 300, 1000])
def test_prefill_sees_the_past_dequantized_and_its_own_keys_exactly(window: int | None, tokens: int) -> None:
    filled = fill(layer_group(window=window), tokens)
    new = mx.random.normal((1, 2, 5, 64))
    keys, values = filled.cache.layers[1].update_and_fetch(new, new)
    assert isinstance(keys, mx.array) and isinstance(values, mx.array)
    expected_keys, expected_values = held(filled, 1)
    first = filled.group.group.first_needed(tokens)
    assert keys.shape == values.shape == (1, 2, tokens - first + 5, 64)
    np.testing.assert_array_equal(np.array(keys[0, :, :-5]), expected_keys[:, first:])
    np.testing.assert_array_equal(np.array(values[0, :, :-5]), expected_values[:, first:])
    assert mx.array_equal(keys[:, :, -5:], new)


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_steps_do_not_change_what_is_held(codec: str) -> None:
    at_once, by_token, by_seven = (fill(layer_group(), 200, codec, step) for step in (256, 1, 7))
    for other in (by_token, by_seven):
        for name, buffer in at_once.group.slabs[0].buffers.items():
            np.testing.assert_array_equal(buffer.host, other.group.slabs[0].buffers[name].host, err_msg=name)
        np.testing.assert_array_equal(at_once.group.recent_k.host[:, :, :8], other.group.recent_k.host[:, :, :8])


def test_blocks_of_unequal_key_and_value_dims() -> None:
    filled = fill(layer_group(1, 192, 80), 300)
    keys, values = filled.group.past(0, mx.float32)
    expected_keys, expected_values = held(filled, 0)
    np.testing.assert_array_equal(np.array(keys[0]), expected_keys)
    np.testing.assert_array_equal(np.array(values[0]), expected_values)


@pytest.mark.parametrize("window", [64, 257, 512, 1024])
def test_a_window_holds_a_ring_of_blocks(window: int) -> None:
    filled = fill(layer_group(window=window), 3000)
    assert filled.group.held_blocks <= ring_blocks(window)
    assert len(filled.group.slabs) == 1
    assert filled.group.slabs[0].blocks * 256 < window + 2 * 256


def test_a_pass_across_a_block_s_end_is_refused() -> None:
    cache = fill(layer_group(), 250).cache
    x = mx.random.normal((1, 2, 7, 64))
    for layer in cache.layers:
        layer.update_and_fetch(x, x)
    with pytest.raises(ValueError, match="crosses"):
        cache.settle(7)


def test_a_layer_that_saw_nothing_is_told() -> None:
    cache = fill(layer_group(), 10).cache
    x = mx.random.normal((1, 2, 1, 64))
    cache.layers[0].update_and_fetch(x, x)
    with pytest.raises(ValueError, match="1 layers of full-0"):
        cache.settle(1)


@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("offset", [0, 3, 63, 64, 300])
@pytest.mark.parametrize("tokens", [1, 2, 40])
@pytest.mark.parametrize("asked", [None, 32])
@pytest.mark.parametrize("as_array", [False, True])
def test_masks_are_mlx_lm_s_own(
    window: int | None, offset: int, tokens: int, asked: int | None, as_array: bool
) -> None:
    filled = fill(layer_group(window=window), offset)
    theirs = KVCache() if window is None else RotatingKVCache(max_size=window)
    for length in passes_of(offset, 64):
        x = mx.zeros((1, 1, length, 8))
        theirs.update_and_fetch(x, x)
    expected = theirs.make_mask(tokens, window_size=asked, return_array=as_array)
    mask = filled.cache.layers[0].make_mask(tokens, window_size=asked, return_array=as_array)
    if tokens == 1:  # a decode step: no mask, or one that hides what the window asked for hides
        hidden = int((~mask).sum()) if isinstance(mask, mx.array) else 0
        width = min(offset, (window or offset + 1) - 1) + 1
        assert hidden == (max(0, width - asked) if asked else 0)
    elif isinstance(expected, mx.array) and isinstance(mask, mx.array):
        assert mx.array_equal(mask, expected)
    else:
        assert mask == expected


def test_slabs_have_a_size_near_64_mb_that_shapes_alone_decide() -> None:
    codec = CODECS["q4-channel"]
    small, large = layer_group(1, 256, 256, layers=3), layer_group(8, 128, 128, layers=32)
    assert FullCache.slab_blocks(small, codec) == 16
    blocks = FullCache.slab_blocks(large, codec)
    nbytes = blocks * sum(part.nbytes for part in quantized_parts(large, codec))
    assert blocks == 4 and nbytes <= 64 << 20 < 2 * nbytes


def test_pooled_memory_is_wiped_before_it_is_used_again() -> None:
    filled = fill(layer_group(), 256)
    pool, slab = SlabPool(), filled.group.slabs[0]
    assert slab.rest is not None
    buffers = [*slab.buffers.values(), *slab.rest.buffers.values()]
    assert all(buffer.host.any() for buffer in buffers)
    pool.give(slab)
    again = pool.take(slab.shape)
    assert again is slab
    assert not any(buffer.host.any() for buffer in buffers)


def test_mlx_sees_what_the_host_writes() -> None:
    slab = fill(layer_group(), 64).group.slabs[0]
    for name, value in (("k.packed", 7), ("k.scales", 0x3F80)):
        slab.buffers[name].host[...] = value
        assert (slab.buffers[name].array[0, 0] == (7 if name == "k.packed" else 1)).all()
