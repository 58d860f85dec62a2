"""An agent's KV cache: quantized blocks, and up to 63 recent tokens in bfloat16.

One `AgentCache` serves one conversation. The model sees a `LayerCache` for each of its layers and calls
`update_and_fetch` on it, as on mlx-lm's own caches:

- Prefill (many queries) gets plain arrays back: the past of that layer, dequantized, then the chunk's own keys and
  values in full precision. The model's attention and masks do the rest.
- Decode (one query) gets a `Handle` back; `attention` computes on the quantized blocks themselves. Latents are keys and
  values at once: beside their handle the layer gets the rotated part of its keys, which is small, as an array.

After the pass `settle` evaluates it and takes its keys and values in: whole groups of 64 tokens are quantized and
copied into their block, the rest becomes recent. A pass never crosses a multiple of 256 tokens, so a block's codes
depend on the text and on how it was fed, never on where a process ended. Layers are kept by layer group, since what
layers of one group share (positions, masks, memory, files) is then worked out once.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache, create_attention_mask, create_causal_mask

from amem_cli.engine.cache.layer_cache import LayerGroupCache
from amem_cli.engine.cache.recurrent import RecurrentCache
from amem_cli.engine.cache.slabs import Slab, SlabPool
from kvstore.format.codecs import Codec
from kvstore.format.layers import LayerGroup


class Handle:
    """Stands for the keys and values of one layer in a decode step; only `attention` knows what to do with it.

    For a layer of latents both are the latents.
    """

    def __init__(self, cache: LayerGroupCache, layer: int, keys: mx.array, values: mx.array) -> None:
        self.cache = cache
        self.layer = layer
        self.keys = keys  # of the token being fed: [1, heads, 1, dim]
        self.values = values


class RowHandles:
    """The handles of several agents, a row each."""

    def __init__(self, rows: Sequence[Handle]) -> None:
        self.rows = rows


class RowMasks:
    """The masks of several agents, a row each; only `attention` knows what to do with them."""

    def __init__(self, rows: Sequence[mx.array | str | None]) -> None:
        self.rows = rows


class LayerCache:
    """What the model sees as the cache of one of its layers."""

    def __init__(self, cache: LayerGroupCache, layer: int, by_handle: bool) -> None:
        self._cache = cache
        self._layer = layer
        self._by_handle = by_handle

    @property
    def offset(self) -> int:
        fresh = self._cache.fresh.get(self._layer)
        return self._cache.offset + (fresh[0].shape[2] if fresh else 0)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array | Handle, mx.array | Handle]:
        """Take this pass's keys and values, [1, heads, tokens, dim]; give what attention is to run over."""
        self._cache.fresh[self._layer] = (keys, values)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array | Handle, mx.array | Handle]:
        """What `update_and_fetch` gave in this pass: a layer without keys of its own asks another's cache."""
        keys, values = self._cache.fresh[self._layer]
        if keys.shape[2] > 1 or not self._by_handle:
            return self._arrays()
        if self._cache.group.latent:
            return Handle(self._cache, self._layer, keys, keys), self._arrays()[1]
        handle = Handle(self._cache, self._layer, keys, values)
        return handle, handle

    def _arrays(self) -> tuple[mx.array, mx.array]:
        """The keys and values of all that this pass can see, [1, heads, tokens, dim]. One left unused costs nothing."""
        keys, values = self._cache.fresh[self._layer]
        if self._cache.offset == 0:
            return keys, values
        past_k, past_v = self._cache.past(self._layer, keys.dtype)
        return mx.concatenate([past_k, keys], axis=2), mx.concatenate([past_v, values], axis=2)

    def make_mask(
        self,
        N: int,  # noqa: N803 (mlx-lm's name)
        window_size: int | None = None,
        return_array: bool = False,
    ) -> mx.array | str | None:
        """The mask for the next N tokens over what `update_and_fetch` will return, oldest first."""
        offset, window = self._cache.offset, self._cache.group.window
        if window is not None:
            wanted = window_size or window
            offset = min(window - 1, offset)
            if offset + N > wanted or return_array:
                # one token that may see all that is held needs no mask
                return create_causal_mask(N, offset, window_size=wanted) if N > 1 or wanted < window else None
            return "causal" if N > 1 else None
        if N == 1 and (window_size is None or offset < window_size):
            return None
        mask: mx.array | str | None = create_attention_mask(N, offset, return_array, window_size)
        return mask

    @property
    def keys(self) -> mx.array:
        """This pass's keys. A model may give them back tied to other arrays that are to be evaluated with them."""
        return self._cache.fresh[self._layer][0]

    @keys.setter
    def keys(self, keys: mx.array) -> None:
        self._cache.fresh[self._layer] = (keys, self.values)

    @property
    def values(self) -> mx.array:
        """This pass's values. A model may set them to zeros where it keeps keys only."""
        return self._cache.fresh[self._layer][1]

    @values.setter
    def values(self, values: mx.array) -> None:
        self._cache.fresh[self._layer] = (self.keys, values)

    def empty(self) -> bool:
        return self._cache.offset == 0

    def size(self) -> int:
        return self.offset

    @property
    def nbytes(self) -> int:
        return self._cache.nbytes // len(self._cache.group.layers)

    # What a chunked cache has besides: here nothing is trimmed, and the model's own mask hides what it may not see.
    start_position = 0

    def maybe_trim_front(self) -> None:
        """Keep all: earlier chunks stay resumable."""


class AgentCache:
    """The whole cache of one conversation; `layers` is what the model is called with.

    `lists` says, for each of the model's layers, how many caches it has: None for one that stands by itself, a number
    for those of a `CacheList`.
    """

    group_cache: type[LayerGroupCache] = LayerGroupCache

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        codec: Codec,
        pool: SlabPool,
        arrays_only: frozenset[int] = frozenset(),
        lists: Sequence[int | None] | None = None,
    ) -> None:
        self.codec = codec
        self.parts = [
            RecurrentCache(group) if group.kind == "recurrent" else self.group_cache(group, codec, pool)
            for group in groups
        ]
        self.groups = [part for part in self.parts if isinstance(part, LayerGroupCache)]
        self.states = [part for part in self.parts if isinstance(part, RecurrentCache)]
        places: dict[int, Any] = {
            layer: LayerCache(group, i, layer not in arrays_only)
            for group in self.groups
            for i, layer in enumerate(group.group.layers)
        }
        for state in self.states:
            places.update(zip(state.group.layers, state.layers, strict=True))
        count = sum(1 if n is None else n for n in lists) if lists else len(places)
        # a cache that the model makes and does not use is in no group
        self.leaves = [places[place] if place in places else KVCache() for place in range(count)]
        self.layers = _listed(self.leaves, lists) if lists else self.leaves

    @property
    def offset(self) -> int:
        """Tokens in the cache."""
        return self.parts[0].offset

    @offset.setter
    def offset(self, tokens: int) -> None:
        for part in self.parts:
            part.offset = tokens

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def slabs(self) -> list[Slab]:
        """All slabs in use, those that other caches share included."""
        return [slab for group in self.groups for slab in group.slabs]

    def settle(self, tokens: int, *outputs: mx.array) -> None:
        """Evaluate the pass of `tokens` tokens that the model has just described, with `outputs`, and take it in."""
        settle([self], tokens, *outputs)

    def forget(self) -> None:
        """Drop the keys and values of a pass that failed, as if it had not begun. States cannot be had back."""
        for group in self.groups:
            group.fresh.clear()

    def release(self) -> None:
        """Give all memory back; the cache must not be used any more."""
        for group in self.groups:
            group.release()


def settle(caches: Sequence[AgentCache], tokens: int, *outputs: mx.array) -> None:
    """Evaluate one pass of `tokens` tokens for each of `caches`, with `outputs`, and let each take in its own."""
    groups = [group for cache in caches for group in cache.groups]
    states = [state for cache in caches for state in cache.states]
    intakes = [group.gather() for group in groups]
    arrays = [array for state in states for array in state.gather()]
    mx.eval(*outputs, *arrays, *(array for intake in intakes for array in intake.arrays()))
    for group, intake in zip(groups, intakes, strict=True):
        group.take(intake)
    for state in states:
        state.offset += tokens


def _listed(leaves: Sequence[Any], lists: Sequence[int | None]) -> list[Any]:
    """The caches as the model's own layers hold them."""
    left = iter(leaves)
    return [next(left) if n is None else CacheList(*(next(left) for _ in range(n))) for n in lists]
