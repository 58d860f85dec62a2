"""Decode attention over quantized blocks, and the one seam through which models reach it.

`scaled_dot_product_attention` is replaced in `mlx_lm.models.base` and in every loaded model file. The replacement
looks at the type of `keys` alone: layers that share their keys pass no cache, or another layer's.

For one query q the scores over a block are `quantized_matmul(q, codes of keys)`, over the recent tokens and the one
being fed a plain matmul; one softmax runs over all of them, and the weights go through the same three products with the
values. The past is never dequantized as a whole. The second layer of codes of the first tokens adds to their scores and
to the output. Columns without a visible token get a weight of exactly zero. The order of the blocks in the sums depends
on the position alone, so a resumed run adds the same numbers in the same order.
"""

import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx_lm.models.base
import numpy as np

from amem_cli.engine.cache.agent_cache import Handle, RowHandles, RowMasks
from amem_cli.engine.cache.block_cache import BlockCache
from amem_cli.engine.cache.codec import scores, weighted
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
    heads, dim = queries.shape[1], queries.shape[3]
    kv_heads = handle.keys.shape[1]
    q = (queries * scale).reshape(kv_heads, heads // kv_heads, dim)
    weights = _softmax(_scores(q, handle), handle.cache, mask, sinks)
    return _output(weights, handle, q.dtype).reshape(1, heads, 1, -1)


def _scores(q: mx.array, handle: Handle) -> mx.array:
    """Scores of a scaled query, [kv heads, repeats, dim], over all columns: [kv heads, repeats, columns]."""
    cache, layer, bits = handle.cache, handle.layer, handle.cache.codec.bits
    keys, axis = cache.keys, cache.keys.axis
    columns = []
    for slab, slots in cache.used_slots():
        s = scores(mx.broadcast_to(q[None], (slots, *q.shape)), keys.read(slab, slice(0, slots), layer), axis, bits)
        columns.append(s.transpose(1, 2, 0, 3).reshape(*q.shape[:2], slots * BLOCK_TOKENS))
    if cache.rest and columns:
        rest, refined = keys.read(cache.rest, slice(0, 1), layer), cache.codec.refined
        first = columns[0][..., :refined] + scores(q[None], rest, axis, bits)[0]
        columns[:1] = [first, columns[0][..., refined:]]
    columns.append(q @ keys.recent.array[layer].astype(q.dtype).swapaxes(-1, -2))
    columns.append(q @ handle.keys[0].swapaxes(-1, -2))
    return mx.concatenate(columns, axis=-1)


def _output(weights: mx.array, handle: Handle, dtype: mx.Dtype) -> mx.array:
    """The sum of the values by their weights, [kv heads, repeats, columns]: [kv heads, repeats, value dim]."""
    cache, layer, bits = handle.cache, handle.layer, handle.cache.codec.bits
    values, axis = cache.values, cache.values.axis
    lead = weights.shape[:2]
    at = 0
    out = mx.zeros((*lead, handle.values.shape[3]), dtype=dtype)
    for slab, slots in cache.used_slots():
        w = weights[..., at : at + slots * BLOCK_TOKENS].reshape(*lead, slots, BLOCK_TOKENS)
        codes = values.read(slab, slice(0, slots), layer)
        out = out + weighted(w.transpose(2, 0, 1, 3), codes, axis, bits).sum(axis=0)
        at += slots * BLOCK_TOKENS
    if cache.rest and at:
        rest = values.read(cache.rest, slice(0, 1), layer)
        out = out + weighted(weights[None, ..., : cache.codec.refined], rest, axis, bits)[0]
    out = out + weights[..., at : at + GROUP_TOKENS] @ values.recent.array[layer].astype(dtype)
    return out + weights[..., at + GROUP_TOKENS :] * handle.values[0]


def _softmax(s: mx.array, cache: BlockCache, mask: Mask, sinks: mx.array | None) -> mx.array:
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


def _by_column(mask: mx.array, cache: BlockCache, shape: tuple[int, ...]) -> tuple[mx.array, mx.array]:
    """A mask that runs from the oldest token to the one being fed, put in the order of the columns.

    Returns it as [kv heads or 1, repeats or 1, columns], and which columns it speaks of at all, bool [columns].
    """
    seen = mask.shape[-1]
    index = cache.columns() - (cache.offset + 1 - seen)
    per_head = mask.ndim == 4 and mask.shape[1] > 1
    rows = mask.reshape(*shape[:2], seen) if per_head else mask.reshape(1, 1, seen)
    return mx.take(rows, mx.array(np.maximum(index, 0)), axis=-1), mx.array(index >= 0)
