"""Caches filled with random keys and values, and attention over them in plain float64 NumPy."""

from dataclasses import dataclass
from typing import Literal

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from amem_cli.engine.cache.agent_cache import AgentCache
from amem_cli.engine.cache.block_cache import BlockCache
from amem_cli.engine.cache.codec import axes_of, dequantize, quantize
from amem_cli.engine.cache.slabs import SlabPool
from kvstore.format.codecs import CODECS, DEFAULT_CODEC, Axis
from kvstore.format.layers import LayerGroup
from kvstore.format.parts import BLOCK_TOKENS, GROUP_TOKENS

Array = npt.NDArray[np.float64]


@dataclass
class Filled:
    """A cache of one layer group, and all keys and values that were ever put in: [layers, heads, tokens, dim]."""

    cache: AgentCache
    keys: mx.array
    values: mx.array

    @property
    def group(self) -> BlockCache:
        return self.cache.with_blocks[0]


def layer_group(
    kv_heads: int = 2, key_dim: int = 64, value_dim: int = 64, window: int | None = None, layers: int = 2
) -> LayerGroup:
    kind: Literal["full", "window"] = "full" if window is None else "window"
    return LayerGroup(f"{kind}-0", kind, tuple(range(layers)), kv_heads, key_dim, value_dim, window)


def passes_of(tokens: int, step: int) -> list[int]:
    """Lengths of passes of up to `step` tokens that never cross a block's end."""
    lengths: list[int] = []
    while sum(lengths) < tokens:
        at = sum(lengths)
        lengths.append(min(step, tokens - at, BLOCK_TOKENS - at % BLOCK_TOKENS))
    return lengths


def fill(group: LayerGroup, tokens: int, codec: str = DEFAULT_CODEC, step: int = 256, seed: int = 0) -> Filled:
    """Feed random keys and values, `step` tokens a pass."""
    mx.random.seed(seed)
    lead = (len(group.layers), group.kv_heads, tokens)
    # a few channels are much larger than the rest, as in real keys
    outliers = mx.where(mx.arange(group.key_dim) % 16 == 0, 8.0, 1.0)
    keys = mx.random.normal((*lead, group.key_dim)) * outliers + outliers
    values = mx.random.normal((*lead, group.value_dim))
    cache = AgentCache((group,), CODECS[codec], SlabPool())
    for length in passes_of(tokens, step):
        at = cache.offset
        for i, layer in enumerate(cache.layers):
            layer.update_and_fetch(keys[i, None, :, at : at + length], values[i, None, :, at : at + length])
        cache.settle(length)
    return Filled(cache, keys, values)


def held(filled: Filled, layer: int) -> tuple[Array, Array]:
    """The keys and values [heads, tokens, dim] as the cache is to hold them: what its own codec makes of them."""
    group, codec = filled.group.group, filled.group.codec
    axes = axes_of(group, codec)
    whole = filled.keys.shape[2] // GROUP_TOKENS * GROUP_TOKENS
    out = []
    for x, axis in ((filled.keys[layer], axes.keys), (filled.values[layer], axes.values)):
        rounded = x.astype(mx.bfloat16)
        parts = [rounded[:, whole:].astype(mx.float32)]
        if whole:
            parts.insert(0, _coded(rounded[:, :whole], axis, codec.bits))
            if codec.refined and group.kind == "full":
                left = rounded[:, :GROUP_TOKENS].astype(mx.float32) - parts[0][:, :GROUP_TOKENS]
                rest = _coded(left.astype(mx.bfloat16), axis, codec.bits)
                parts[:1] = [parts[0][:, :GROUP_TOKENS] + rest, parts[0][:, GROUP_TOKENS:]]
        out.append(np.array(mx.concatenate(parts, axis=1), dtype=np.float64))
    return out[0], out[1]


def _coded(x: mx.array, axis: Axis, bits: int) -> mx.array:
    """What x, [heads, tokens, dim], is as codes."""
    return dequantize(quantize(x, axis, bits), axis, bits, mx.float32)


def attention(
    queries: Array,
    keys: Array,
    values: Array,
    scale: float,
    visible: npt.NDArray[np.bool_],
    bias: Array | None = None,
    sinks: Array | None = None,
    cap: float | None = None,
) -> Array:
    """Softmax attention: queries [heads, dim], keys and values [kv heads, tokens, dim]; [heads, value dim] out."""
    repeats = queries.shape[0] // keys.shape[0]
    k, v = np.repeat(keys, repeats, axis=0), np.repeat(values, repeats, axis=0)
    s = np.einsum("hd,htd->ht", queries, k) * scale
    if cap is not None:
        s = np.tanh(s / cap) * cap
    if bias is not None:
        s = s + bias
    s = np.where(visible, s, -np.inf)
    top = s.max(axis=1, keepdims=True)
    if sinks is not None:
        top = np.maximum(top, sinks[:, None])
    e = np.exp(s - top)
    total = e.sum(axis=1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[:, None] - top)
    return np.asarray(np.einsum("ht,htd->hd", e / total, v))
