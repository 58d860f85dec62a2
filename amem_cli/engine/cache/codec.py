"""Keys and values to codes and back.

A group of 64 elements shares one scale and one bias (affine, as `mx.quantize` does it). Keys are grouped along the
tokens, per channel: keys have outlier channels, and 64 tokens of one channel span a small range where 64 channels
of one token do not. The quantized axis always comes last, so a block feeds `mx.quantized_matmul` as it is stored.
"""

from typing import NamedTuple

import mlx.core as mx

from kvstore.format.codecs import Axis, Codec
from kvstore.format.layers import LayerGroup, stored_axes
from kvstore.format.parts import GROUP_TOKENS

MANY_ROWS = 16  # query heads for each head of keys; from here on the CPU is quicker if it dequantizes a slab first


class Quantized(NamedTuple):
    """Codes of keys or values, quantized along the last axis.

    packed uint32 [..., rows, words]; scales and biases bfloat16 [..., rows, groups].
    Rows are channels and the last axis is tokens where `axis` is "token", and the other way round otherwise.
    """

    packed: mx.array
    scales: mx.array
    biases: mx.array


class Axes(NamedTuple):
    """The axes along which a layer group's keys and values are really quantized."""

    keys: Axis
    values: Axis


def axes_of(group: LayerGroup, codec: Codec) -> Axes:
    """The codec's axes; a head dim that is no multiple of 64 is grouped along the tokens."""
    return Axes(*stored_axes(group, codec))


def quantize(x: mx.array, axis: Axis, bits: int) -> Quantized:
    """Quantize x, bfloat16 [..., tokens, dim] with tokens a multiple of 64.

    Along the channels as `mx.quantize` does it: zero is a code, and one end of the range may be cut by half a step.
    Along the tokens both ends are codes, since a channel's extremes matter more than its zero: the least element is
    subtracted first, so that the quantized range begins at zero.
    """
    if axis == "channel":
        return Quantized(*mx.quantize(x, group_size=GROUP_TOKENS, bits=bits))
    groups = mx.unflatten(x.astype(mx.float32), -2, (-1, GROUP_TOKENS))
    least = groups.min(axis=-2, keepdims=True)  # [..., groups, 1, dim]
    rows = (groups - least).flatten(-3, -2).swapaxes(-1, -2)
    packed, scales, biases = mx.quantize(rows, group_size=GROUP_TOKENS, bits=bits)
    biases = biases + least.squeeze(-2).swapaxes(-1, -2)
    return Quantized(packed, scales.astype(mx.bfloat16), biases.astype(mx.bfloat16))


def dequantize(q: Quantized, axis: Axis, bits: int, dtype: mx.Dtype) -> mx.array:
    """The keys or values [..., tokens, dim] that the codes stand for, computed and returned in `dtype`."""
    x = mx.dequantize(q.packed, q.scales.astype(dtype), q.biases.astype(dtype), group_size=GROUP_TOKENS, bits=bits)
    return x.swapaxes(-1, -2) if axis == "token" else x


def join_slots(q: Quantized, axis: Axis, bits: int, dtype: mx.Dtype) -> mx.array:
    """The keys or values of neighbouring slots, codes [slots, heads, rows, ...], as one array [heads, tokens, dim]."""
    x = dequantize(q, axis, bits, dtype)
    slots, heads, tokens, dim = x.shape
    return x.swapaxes(0, 1).reshape(heads, slots * tokens, dim)


def left_over(x: mx.array, codes: Quantized, axis: Axis, codec: Codec) -> Quantized:
    """The second layer of codes: of what `codes` leave over of the first tokens of x, [layers, heads, tokens, dim]."""
    first = slice(0, codec.refined)
    held = dequantize(codes, axis, codec.bits, mx.float32)
    left = x[:, :, first].astype(mx.float32) - held[:, :, first]
    return quantize(left.astype(mx.bfloat16), axis, codec.bits)


def scores(queries: mx.array, keys: Quantized, axis: Axis, bits: int) -> mx.array:
    """queries [..., rows, dim] times quantized keys, transposed: [..., rows, tokens]."""
    if _decoded_once(queries):
        return queries @ _plain(keys, axis, bits, queries).swapaxes(-1, -2)
    return _matmul(queries, keys, transpose=axis == "channel", bits=bits)


def weighted(weights: mx.array, values: Quantized, axis: Axis, bits: int) -> mx.array:
    """weights [..., rows, tokens] times quantized values: [..., rows, dim]."""
    if _decoded_once(weights):
        return weights @ _plain(values, axis, bits, weights)
    return _matmul(weights, values, transpose=axis == "token", bits=bits)


def _decoded_once(x: mx.array) -> bool:
    """Whether so many rows [..., rows, n] share codes that decoding once is quicker: the CPU decodes for each row."""
    return x.shape[-2] >= MANY_ROWS and mx.default_device().type == mx.DeviceType.cpu


def _plain(q: Quantized, axis: Axis, bits: int, beside: mx.array) -> mx.array:
    """The dequantized codes in the type of `beside`, computed after it, so that few layers' are in memory at once."""
    packed, scales, biases = mx.depends([*q], [beside])
    return dequantize(Quantized(packed, scales, biases), axis, bits, beside.dtype)


def _matmul(x: mx.array, w: Quantized, transpose: bool, bits: int) -> mx.array:
    return mx.quantized_matmul(
        x,
        w.packed,
        w.scales.astype(x.dtype),
        w.biases.astype(x.dtype),
        transpose=transpose,
        group_size=GROUP_TOKENS,
        bits=bits,
    )
