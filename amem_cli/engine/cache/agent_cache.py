"""An agent's KV cache: quantized blocks, and up to 63 recent tokens in bfloat16.

One `AgentCache` serves one conversation. The model sees a `LayerCache` for each of its layers and calls
`update_and_fetch` on it, as on mlx-lm's own caches:

- Prefill (many queries) returns plain arrays: the past of that layer, dequantized, then the chunk's own keys and
  values in full precision. The model's attention and masks do the rest.
- Decode (one query) returns a `Handle`; `attention` computes on the quantized blocks themselves. Latents are keys and
  values at once: besides their handle the layer gets the rotated part of its keys, which is small, as an array.

After the pass `settle` evaluates it and takes in its keys and values: whole groups of 64 tokens are quantized and
copied into their block, the rest becomes recent. A pass never crosses a multiple of 256 tokens, so a block's codes
depend on the text and its passes, never on where a process ended. Layers are kept by layer group: positions, masks,
memory and files are the same for all layers of a group.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache

from amem_cli.engine.cache.attention_caches import FullCache, WindowCache
from amem_cli.engine.cache.block_cache import BlockCache
from amem_cli.engine.cache.layer_group_cache import LayerGroupCache
from amem_cli.engine.cache.recurrent import RecurrentCache
from amem_cli.engine.cache.slabs import Slab, SlabPool
from kvstore.format.codecs import Codec
from kvstore.format.layers import Kind, LayerGroup

CACHES: Mapping[Kind, type[LayerGroupCache]] = {"full": FullCache, "window": WindowCache, "recurrent": RecurrentCache}
"""The class that caches a layer group of each kind."""


class Handle:
    """The keys and values of one layer in a decode step, in place of arrays. Only `attention` reads it.

    For a layer of latents both are the latents.
    """

    def __init__(self, cache: BlockCache, layer: int, keys: mx.array, values: mx.array) -> None:
        self.cache = cache
        self.layer = layer
        self.keys = keys  # of the token being fed: [1, heads, 1, dim]
        self.values = values


class RowHandles:
    """The handles of several agents, a row each."""

    def __init__(self, rows: Sequence[Handle]) -> None:
        self.rows = rows


class RowMasks:
    """The masks of several agents, a row each. Only `attention` reads it."""

    def __init__(self, rows: Sequence[mx.array | str | None]) -> None:
        self.rows = rows


class LayerCache:
    """What the model sees as the cache of one of its layers."""

    def __init__(self, cache: BlockCache, layer: int, by_handle: bool) -> None:
        self._cache = cache
        self._layer = layer
        self._by_handle = by_handle

    @property
    def offset(self) -> int:
        fresh = self._cache.fresh.get(self._layer)
        return self._cache.offset + (fresh[0].shape[2] if fresh else 0)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array | Handle, mx.array | Handle]:
        """Take this pass's keys and values, [1, heads, tokens, dim]; return what attention runs over."""
        self._cache.fresh[self._layer] = (keys, values)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array | Handle, mx.array | Handle]:
        """What `update_and_fetch` returned in this pass: a layer without keys of its own asks another's cache."""
        keys, values = self._cache.fresh[self._layer]
        if keys.shape[2] > 1 or not self._by_handle:
            return self._arrays()
        if self._cache.holds_latents:
            return Handle(self._cache, self._layer, keys, keys), self._arrays()[1]
        handle = Handle(self._cache, self._layer, keys, values)
        return handle, handle

    def _arrays(self) -> tuple[mx.array, mx.array]:
        """The keys and values of all that this pass can see, [1, heads, tokens, dim]. An unused one costs nothing."""
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
        return self._cache.mask(N, window_size, return_array)

    @property
    def keys(self) -> mx.array:
        """This pass's keys. A model may replace them by ones that depend on other arrays, to have those evaluated."""
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

    `lists` has an entry for each of the model's layers: None for a single cache, a number for a `CacheList` of so many.
    `classes`: by layer kind.
    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        codec: Codec,
        pool: SlabPool,
        arrays_only: frozenset[int] = frozenset(),
        lists: Sequence[int | None] | None = None,
        classes: Mapping[Kind, type[LayerGroupCache]] = CACHES,
    ) -> None:
        self.codec = codec
        self.caches = [classes[group.kind](group, codec, pool) for group in groups]
        self.with_blocks = [cache for cache in self.caches if isinstance(cache, BlockCache)]
        self.recurrent = [cache for cache in self.caches if isinstance(cache, RecurrentCache)]
        places: dict[int, Any] = {
            layer: LayerCache(cache, i, layer not in arrays_only)
            for cache in self.with_blocks
            for i, layer in enumerate(cache.group.layers)
        }
        for state in self.recurrent:
            places.update(zip(state.group.layers, state.layers, strict=True))
        count = sum(1 if n is None else n for n in lists) if lists else len(places)
        # a cache that the model makes and does not use is in no group
        self.leaves = [places[place] if place in places else KVCache() for place in range(count)]
        self.layers = _listed(self.leaves, lists) if lists else self.leaves

    @property
    def offset(self) -> int:
        """Tokens in the cache."""
        return self.caches[0].offset

    @offset.setter
    def offset(self, tokens: int) -> None:
        for cache in self.caches:
            cache.offset = tokens

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches)

    @property
    def slabs(self) -> list[Slab]:
        """All slabs in use, those that other caches share included."""
        return [slab for cache in self.with_blocks for slab in cache.slabs]

    def settle(self, tokens: int, *outputs: mx.array) -> None:
        """Evaluate the pass of `tokens` tokens whose graph the model has built, with `outputs`, and take it in."""
        settle([self], tokens, *outputs)

    def forget(self) -> None:
        """Drop the keys and values of a pass that failed, as if it had not begun. Recurrent state is not restored."""
        for cache in self.caches:
            cache.forget()

    def release(self) -> None:
        """Free all memory; the cache must not be used any more."""
        for cache in self.caches:
            cache.release()


def settle(caches: Sequence[AgentCache], tokens: int, *outputs: mx.array) -> None:
    """Evaluate one pass of `tokens` tokens for each of `caches`, with `outputs`, and let each take in its own."""
    with_blocks = [part for cache in caches for part in cache.with_blocks]
    recurrent = [part for cache in caches for part in cache.recurrent]
    intakes = [part.gather() for part in with_blocks]
    states = [array for part in recurrent for array in part.gather()]
    mx.eval(*outputs, *states, *(array for intake in intakes for array in intake.arrays()))
    for part, intake in zip(with_blocks, intakes, strict=True):
        part.take(intake)
    for state in recurrent:
        state.offset += tokens


def footprint(groups: Sequence[LayerGroup], codec: Codec, tokens: int) -> int:
    """Bytes that a cache of `tokens` tokens takes in memory: whole slabs, refining codes, recent tokens, states."""
    return sum(CACHES[group.kind].footprint(group, codec, tokens) for group in groups)


def _listed(leaves: Sequence[Any], lists: Sequence[int | None]) -> list[Any]:
    """The caches as the model's own layers hold them."""
    left = iter(leaves)
    return [next(left) if n is None else CacheList(*(next(left) for _ in range(n))) for n in lists]
