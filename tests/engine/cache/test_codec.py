"""Codes of keys and values, against what they stand for."""

import mlx.core as mx
import numpy as np
import pytest

from amem_cli.engine.cache.codec import dequantize, quantize
from kvstore.format.codecs import Axis
from kvstore.format.document import replace
from kvstore.format.parts import GROUP_TOKENS
from tests.support.engine.caches import fill, held, layer_group


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("offset", [0.0, 40.0, -300.0])
def test_both_ends_of_a_channel_are_codes(bits: int, offset: float) -> None:
    x = (mx.random.normal((2, 3, 128, 64), key=mx.random.key(0)) * 3 + offset).astype(mx.bfloat16)
    back = np.array(dequantize(quantize(x, "token", bits), "token", bits, mx.float32))
    plain = np.array(x.astype(mx.float32))
    for group in (slice(0, GROUP_TOKENS), slice(GROUP_TOKENS, 2 * GROUP_TOKENS)):
        own, found = plain[..., group, :], back[..., group, :]
        step = (own.max(axis=2) - own.min(axis=2)) / (2**bits - 1)
        rounding = (2**bits - 1) * step * 2**-8  # of the scale, to bfloat16
        for end in (np.max, np.min):
            np.testing.assert_array_less(np.abs(end(own, axis=2) - end(found, axis=2)), rounding + 1e-6)
        np.testing.assert_array_less(np.abs(own - found).max(axis=2), step / 2 + rounding + 1e-6)


@pytest.mark.parametrize("value", [0.0, 3.0, -7.5])
@pytest.mark.parametrize("axis", ["token", "channel"])
def test_equal_elements_are_exact(value: float, axis: Axis) -> None:
    x = mx.full((1, 64, 64), value).astype(mx.bfloat16)
    back = dequantize(quantize(x, axis, 4), axis, 4, mx.float32)
    assert mx.array_equal(back, x.astype(mx.float32))


@pytest.mark.parametrize("latent", [False, True])
def test_the_first_tokens_are_as_good_as_in_eight_bits(latent: bool) -> None:
    def errors(codec: str) -> tuple[float, float]:
        """The mean error of the first 64 tokens, and of the others."""
        filled = fill(replace(layer_group(), latent=latent), 192, codec)
        put_in = [np.array(x[0].astype(mx.bfloat16).astype(mx.float32)) for x in (filled.keys, filled.values)]
        off = np.abs(np.stack(put_in) - np.stack(held(filled, 0)))  # [keys and values, heads, tokens, dim]
        return float(off[:, :, :GROUP_TOKENS].mean()), float(off[:, :, GROUP_TOKENS:].mean())

    sink, plain, eight = (errors(codec) for codec in ("q4-sink", "q4-channel", "q8-channel"))
    assert sink[0] < 1.5 * eight[0] < plain[0] / 5
    assert sink[1] == plain[1]
