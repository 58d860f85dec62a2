"""Decode attention over quantized blocks, and the one seam through which models reach it.

`scaled_dot_product_attention` is replaced in `mlx_lm.models.base` and in every loaded model file. The replacement
looks at the type of `keys` alone: layers that share their keys pass no cache, or another layer's.

For one query q the scores over a block are `quantized_matmul(q, codes of keys)`, over the recent tokens and the one
being fed a plain matmul; one softmax runs over all of them, and the weights go back through the same three matmuls.
No past is put together in full precision. What refines the first tokens adds to their scores and to the output. Columns
that hold no visible token get a weight of exactly zero. The order of the blocks in the sums depends on the position
alone, so a resumed run adds the same numbers in the same order.
"""

import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx_lm.models.base
import numpy as np

from amem_cli.engine.cache.agent_cache import Handle, RowHandles, RowMasks
from amem_cli.engine.cache.codec import scores, weighted
from amem_cli.engine.cache.layer_cache import LayerGroupCache
from amem_cli.engine.cache.slabs import Slab
from kvstore.format.parts import BLOCK_TOKENS, GROUP_TOKENS

_original: Callable[..., mx.array] = mlx_lm.models.base.scaled_dot_product_attention
Mask = mx.array | str | None


def install() -> None:
    """Put the seam into every model file that is loaded by now. Calling it again is harmless."""
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.models.") and getattr(module, _original.__name__, None) is _original:
            setattr(module, _original.__name__, _dispatch)


def _dispatch(queries: mx.array, keys: Any, values: Any, *args: Any, **kwargs: Any) -> mx.array:
    if isinstance(keys, Handle | RowHandles):
        if values is not keys:
            raise TypeError("attention on codes needs the handle both as keys and as values")
        return _from_mlx_lm(queries, keys, *args, **kwargs)
    return _original(queries, keys, values, *args, **kwargs)


def _from_mlx_lm(
    queries: mx.array,
    keys: Handle | RowHandles,
    cache: object,  # noqa: ARG001 (part of mlx-lm's signature; see the module's docstring)
    scale: float,
    mask: Mask | RowMasks,
    sinks: mx.array | None = None,
) -> mx.array:
    if isinstance(keys, Handle):
        assert not isinstance(mask, RowMasks)
        return decode_attention(queries, keys, scale, mask, sinks)
    masks = mask.rows if isinstance(mask, RowMasks) else [mask] * len(keys.rows)
    rows = zip(keys.rows, masks, strict=True)
    return mx.concatenate(
        [decode_attention(queries[i : i + 1], row, scale, own, sinks) for i, (row, own) in enumerate(rows)]
    )


def decode_attention(
    queries: mx.array, handle: Handle, scale: float, mask: Mask = None, sinks: mx.array | None = None
) -> mx.array:
    """Attention of one query, [1, heads, 1, dim], over all that the handle's layer holds: [1, heads, 1, value dim].

    `mask` is None, "causal", or a bool or additive array whose last axis ends with the token being fed, oldest
    first. `sinks` [heads] are logits that take part in the softmax and carry no value.
    """
    cache, layer, bits = handle.cache, handle.layer, handle.cache.codec.bits
    if cache.group.latent:  # keys and values at once
        read_values, value_axis, recent_v = Slab.keys, cache.axes.keys, cache.recent_k
    else:
        read_values, value_axis, recent_v = Slab.values, cache.axes.values, cache.recent_v
    heads, dim = queries.shape[1], queries.shape[3]
    kv_heads = handle.keys.shape[1]
    repeats = heads // kv_heads
    q = (queries * scale).reshape(kv_heads, repeats, dim)

    columns = []
    for slab, slots in cache.used_slots():
        keys = slab.keys(slice(0, slots), layer)
        s = scores(mx.broadcast_to(q[None], (slots, *q.shape)), keys, cache.axes.keys, bits)
        columns.append(s.transpose(1, 2, 0, 3).reshape(kv_heads, repeats, slots * BLOCK_TOKENS))
    if cache.rest and columns:
        rest, refined = cache.rest.keys(slice(0, 1), layer), cache.codec.refined
        first = columns[0][..., :refined] + scores(q[None], rest, cache.axes.keys, bits)[0]
        columns[:1] = [first, columns[0][..., refined:]]
    columns.append(q @ cache.recent_k.array[layer].astype(q.dtype).swapaxes(-1, -2))
    columns.append(q @ handle.keys[0].swapaxes(-1, -2))
    weights = _softmax(mx.concatenate(columns, axis=-1), cache, mask, sinks)

    at = 0
    out = mx.zeros((kv_heads, repeats, handle.values.shape[3]), dtype=q.dtype)
    for slab, slots in cache.used_slots():
        values = read_values(slab, slice(0, slots), layer)
        w = weights[..., at : at + slots * BLOCK_TOKENS].reshape(kv_heads, repeats, slots, BLOCK_TOKENS)
        out = out + weighted(w.transpose(2, 0, 1, 3), values, value_axis, bits).sum(axis=0)
        at += slots * BLOCK_TOKENS
    if cache.rest and at:
        rest = read_values(cache.rest, slice(0, 1), layer)
        out = out + weighted(weights[None, ..., : cache.codec.refined], rest, value_axis, bits)[0]
    out = out + weights[..., at : at + GROUP_TOKENS] @ recent_v.array[layer].astype(q.dtype)
    out = out + weights[..., at + GROUP_TOKENS :] * handle.values[0]
    return out.reshape(1, heads, 1, -1)


def _softmax(s: mx.array, cache: LayerGroupCache, mask: Mask, sinks: mx.array | None) -> mx.array:
    """Weights over the columns, [kv heads, repeats, columns]."""
    lowest = mx.finfo(s.dtype).min
    visible = cache.visible()
    if isinstance(mask, mx.array):
        given, present = _by_column(mask, cache, s.shape)
        visible = visible & present
        if mask.dtype == mx.bool_:
            visible = visible & given
        else:
            s = s + given.astype(s.dtype)
    s = mx.where(visible, s, lowest)
    if sinks is None:
        return mx.softmax(s, axis=-1, precise=True)
    sink = mx.broadcast_to(sinks.astype(s.dtype).reshape(*s.shape[:2], 1), (*s.shape[:2], 1))
    return mx.softmax(mx.concatenate([sink, s], axis=-1), axis=-1, precise=True)[..., 1:]


def _by_column(mask: mx.array, cache: LayerGroupCache, shape: tuple[int, ...]) -> tuple[mx.array, mx.array]:
    """A mask that runs from the oldest token to the one being fed, put in the order of the columns.

    Returns it as [kv heads or 1, repeats or 1, columns], and which columns it speaks of at all, bool [columns].
    """
    seen = mask.shape[-1]
    index = cache.columns() - (cache.offset + 1 - seen)
    per_head = mask.ndim == 4 and mask.shape[1] > 1
    rows = mask.reshape(*shape[:2], seen) if per_head else mask.reshape(1, 1, seen)
    return mx.take(rows, mx.array(np.maximum(index, 0)), axis=-1), mx.array(index >= 0)
