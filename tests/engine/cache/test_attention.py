"""Decode attention against full precision over what the cache holds: the codec's error cancels out, so only the
arithmetic's rounding is left. And against full precision over what was put in: the codec's error alone."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import base

from amem_cli.engine.cache import attention as seam
from amem_cli.engine.cache.agent_cache import Handle, LayerCache
from amem_cli.engine.cache.attention import decode_attention
from amem_cli.engine.cache.codec import MANY_ROWS
from kvstore.format.codecs import CODECS
from kvstore.format.document import replace
from tests.support.engine.caches import Filled, attention, fill, held, layer_group
from tests.support.models import kinds

ROUNDING = 2e-4


def decode(
    filled: Filled, heads: int, layer: int = 1, mask: mx.array | str | None = None, sinks: mx.array | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """One query through the cache; returns the output [heads, value dim], the query, and the new key and value."""
    group = filled.group.group
    q = mx.random.normal((1, heads, 1, group.key_dim))
    k = mx.random.normal((1, group.kv_heads, 1, group.key_dim))
    v = mx.random.normal((1, group.kv_heads, 1, group.value_dim))
    handle, _ = filled.cache.layers[layer].update_and_fetch(k, v)
    assert isinstance(handle, Handle)
    out = decode_attention(q, handle, group.key_dim**-0.5, mask, sinks)
    assert out.shape == (1, heads, 1, group.value_dim)
    return np.array(out)[0, :, 0], np.array(q)[0, :, 0], np.array(k)[0], np.array(v)[0]


def check(filled: Filled, heads: int, mask: mx.array | str | None = None, sinks: mx.array | None = None) -> None:
    group, offset = filled.group.group, filled.cache.offset
    out, q, k, v = decode(filled, heads, 1, mask, sinks)
    keys, values = held(filled, 1)
    keys, values = np.concatenate([keys, k], axis=1), np.concatenate([values, v], axis=1)
    visible = np.arange(offset + 1) >= group.first_needed(offset)
    bias = None
    if isinstance(mask, mx.array):
        given = np.array(mask).reshape(-1, mask.shape[-1])
        full = np.zeros((given.shape[0], offset + 1), given.dtype)
        full[:, offset + 1 - given.shape[1] :] = given
        if given.dtype == np.bool_:
            visible = visible & full
        else:
            bias = full.astype(np.float64)
            visible = visible & (np.arange(offset + 1) >= offset + 1 - given.shape[1])
    s = None if sinks is None else np.array(sinks, dtype=np.float64)
    expected = attention(q, keys, values, group.key_dim**-0.5, visible, bias, s)
    np.testing.assert_allclose(out, expected, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("tokens", [0, 1, 63, 64, 65, 255, 256, 257, 600])
@pytest.mark.parametrize("codec", sorted(CODECS))
def test_equals_full_precision_over_what_is_held(tokens: int, codec: str) -> None:
    check(fill(layer_group(), tokens, codec), heads=4)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (80, 80), (96, 96), (128, 64), (192, 128), (256, 256)])
def test_any_head_dim(key_dim: int, value_dim: int) -> None:
    check(fill(layer_group(1, key_dim, value_dim), 330), heads=8)


@pytest.mark.parametrize("window", [64, 100, 512])
@pytest.mark.parametrize("tokens", [50, 64, 300, 511, 512, 513, 1300])
def test_window_sees_its_own_tokens_only(window: int, tokens: int) -> None:
    check(fill(layer_group(window=window), tokens), heads=4)


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_many_queries_to_a_key(codec: str) -> None:
    check(fill(layer_group(), 330, codec), heads=2 * MANY_ROWS)


def test_many_blocks_span_slabs() -> None:
    filled = fill(layer_group(layers=2), 17 * 256 + 70)
    assert len(filled.group.slabs) == 2
    check(filled, heads=2)


@pytest.mark.parametrize("window", [None, 128])
def test_sinks_take_part_and_carry_no_value(window: int | None) -> None:
    check(fill(layer_group(window=window), 300), heads=4, sinks=mx.array([0.5, -1.0, 3.0, 0.0]))


@pytest.mark.parametrize("shape", ["flat", "row", "shared", "per head"])
def test_bool_mask_is_honoured(shape: str) -> None:
    filled = fill(layer_group(), 300)
    heads = 4 if shape == "per head" else 1
    keep = np.random.default_rng(0).random((heads, 301)) < 0.5
    keep[:, -1] = True
    sizes = {"flat": (301,), "row": (1, 301), "shared": (1, 1, 1, 301), "per head": (1, 4, 1, 301)}
    check(filled, heads=4, mask=mx.array(keep.reshape(sizes[shape])))


@pytest.mark.parametrize("window", [None, 128])
def test_additive_mask_over_the_last_tokens(window: int | None) -> None:
    filled = fill(layer_group(window=window), 300)
    bias = np.random.default_rng(1).normal(size=(1, 1, 1, 90)).astype(np.float32)
    check(filled, heads=4, mask=mx.array(bias))


def latents(tokens: int, codec: str, heads: int = 4) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One query over latents through the seam: what comes out, what should by what the cache holds, and by what was
    put in. The rotated parts' scores come as an additive mask, as models of multi-head latent attention bring them."""
    filled = fill(replace(layer_group(1, 128, 32), latent=True), tokens, codec)
    queries, latent, rotated = (mx.random.normal((1, n, 1, dim)) for n, dim in ((heads, 160), (1, 128), (1, 32)))
    handle, parts = filled.cache.layers[1].update_and_fetch(latent, rotated)
    assert isinstance(handle, Handle) and parts.shape == (1, 1, tokens + 1, 32)
    plain, turned = mx.split(queries, [128], axis=-1)
    bias = (turned * 160**-0.5) @ parts.swapaxes(-1, -2)
    seam.install()
    out = base.scaled_dot_product_attention(plain, handle, handle, cache=None, scale=160**-0.5, mask=bias)

    def plainly(past: np.ndarray, past_rotated: np.ndarray) -> np.ndarray:
        values = np.concatenate([past, np.array(latent)[0]], axis=1)
        keys = np.concatenate([values, np.concatenate([past_rotated, np.array(rotated)[0]], axis=1)], axis=-1)
        visible = np.ones(tokens + 1, np.bool_)
        return attention(np.array(queries)[0, :, 0], keys, values, 160**-0.5, visible)

    put_in = np.array(filled.keys[1]), np.array(filled.values[1])
    return np.array(out)[0, :, 0], plainly(*held(filled, 1)), plainly(*put_in)


@pytest.mark.parametrize("tokens", [0, 1, 64, 255, 257, 600, 17 * 256 + 70])
@pytest.mark.parametrize("codec", ["q4-channel", "q8-channel", "q4-token"])
@pytest.mark.parametrize("heads", [4, MANY_ROWS])
def test_latents_are_keys_and_values_at_once(tokens: int, codec: str, heads: int) -> None:
    out, by_what_is_held, _ = latents(tokens, codec, heads)
    np.testing.assert_allclose(out, by_what_is_held, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize(("codec", "worst"), [("q8-channel", 0.15), ("q4-channel", 2.0)])
def test_error_of_latents_is_the_codec_s(codec: str, worst: float) -> None:
    out, _, expected = latents(512, codec)
    assert ROUNDING < np.abs(out - expected).max() < worst


@pytest.mark.parametrize("tokens", [1, 64, 300])
@pytest.mark.parametrize("heads", [2, 6])
def test_capped_scores_over_arrays(tokens: int, heads: int) -> None:
    """Gemma 2 caps the scores itself, so it gets arrays: its layer against full precision over what is held."""
    cap, dim = 3.0, 64
    config: dict[str, Any] = {
        "attn_logit_softcapping": cap,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "head_dim": dim,
    }
    layer: Any = kinds.build("gemma2", **config).layers[0].self_attn
    filled = fill(layer_group(2, dim, dim), tokens)
    cache = LayerCache(filled.group, 1, by_handle=False)
    x = mx.random.normal((1, 1, layer.q_proj.weight.shape[1]))
    out = layer(x, cache=cache)

    q, k, v = (project(x).reshape(-1, 1, dim) for project in (layer.q_proj, layer.k_proj, layer.v_proj))
    q, k = (layer.rope(array[None], offset=tokens)[0] for array in (q, k))
    keys, values = (
        np.concatenate([past, np.array(new)], axis=1) for past, new in zip(held(filled, 1), (k, v), strict=True)
    )
    capped = attention(np.array(q)[:, 0], keys, values, layer.scale, np.ones(tokens + 1, np.bool_), cap=cap)
    expected = np.array(layer.o_proj.weight, np.float64) @ capped.reshape(-1)
    np.testing.assert_allclose(np.array(out)[0, 0], expected, rtol=0, atol=ROUNDING)
    uncapped = attention(np.array(q)[:, 0], keys, values, layer.scale, np.ones(tokens + 1, np.bool_))
    assert tokens == 1 or np.abs(uncapped - capped).max() > 10 * ROUNDING


def test_a_handle_for_keys_alone_is_refused() -> None:
    filled = fill(replace(layer_group(1, 64, 32), latent=True), 70)
    x = mx.random.normal((1, 1, 1, 64))
    handle, parts = filled.cache.layers[0].update_and_fetch(x, x[..., :32])
    seam.install()
    with pytest.raises(TypeError, match="both as keys and as values"):
        base.scaled_dot_product_attention(x, handle, parts, cache=None, scale=0.1, mask=None)


def test_causal_mask_changes_nothing_for_one_query() -> None:
    check(fill(layer_group(), 100), heads=2, mask="causal")


@pytest.mark.parametrize(("codec", "worst"), [("q8-channel", 0.02), ("q4-channel", 0.25)])
def test_error_is_the_codec_s(codec: str, worst: float) -> None:
    filled = fill(layer_group(), 512, codec)
    out, q, k, v = decode(filled, heads=4)
    keys = np.concatenate([np.array(filled.keys[1]), k], axis=1)
    values = np.concatenate([np.array(filled.values[1]), v], axis=1)
    expected = attention(q, keys, values, 64**-0.5, np.ones(513, np.bool_))
    error = np.abs(out - expected).max()
    assert ROUNDING < error < worst


def test_channel_keys_bear_outliers_that_token_keys_do_not() -> None:
    def error(codec: str) -> float:
        filled = fill(layer_group(), 512, codec)
        keys, _ = held(filled, 0)
        return float(np.abs(keys - np.array(filled.keys[0])).mean())

    assert error("q4-channel") < 0.5 * error("q4-token")


def test_seam_is_in_place_and_leaves_plain_arrays_alone() -> None:
    import mlx_lm.models.llama as llama

    seam.install()
    seam.install()
    assert llama.scaled_dot_product_attention is base.scaled_dot_product_attention
    x = mx.random.normal((1, 2, 3, 64))
    plain = mx.fast.scaled_dot_product_attention(x, x, x, scale=0.1, mask="causal")
    assert mx.array_equal(llama.scaled_dot_product_attention(x, x, x, None, scale=0.1, mask="causal"), plain)
    filled = fill(layer_group(), 70)
    k = mx.random.normal((1, 2, 1, 64))
    handle, values = filled.cache.layers[0].update_and_fetch(k, k)
    assert isinstance(handle, Handle)
    out = llama.scaled_dot_product_attention(k, handle, values, cache=None, scale=0.1, mask=None)
    assert mx.array_equal(out, decode_attention(k, handle, 0.1))
