"""What a model's cache is made of, found by looking: the caches it makes, and one probing pass.

Nothing is known by model name. `make_cache` tells each layer's kind, a pass through those caches tells heads, dims
and states, and a decode step through the real cache tells which layers compute on the keys themselves instead of
handing them to attention. Graphs are built and never evaluated, so probing costs no arithmetic.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, RotatingKVCache, make_prompt_cache

from amem_cli.engine import attention
from amem_cli.engine.cache import AgentCache, LayerCache
from amem_cli.engine.slab import SlabPool
from kvstore.errors import ModelMismatchError
from kvstore.shapes import CODECS, DEFAULT_CODEC, Codec, Dtype, LayerGroup, Part

_DTYPES: dict[mx.Dtype, Dtype] = {mx.float32: "F32", mx.bfloat16: "BF16", mx.float16: "F16"}


@dataclass(frozen=True)
class ModelCacheSpec:
    """A model's layer groups, its layers that need plain arrays in decode too, and those that hold several caches.

    Groups and `arrays_only` count caches, not layers: a layer of `lists` has that many of them.
    """

    groups: tuple[LayerGroup, ...]
    arrays_only: frozenset[int]
    lists: tuple[int | None, ...]

    def new_cache(self, codec: Codec, pool: SlabPool) -> AgentCache:
        """An empty cache for one agent."""
        return AgentCache(self.groups, codec, pool, self.arrays_only, self.lists)


def describe(model: Module) -> ModelCacheSpec:
    """Find a model's layer groups.

    Raises ModelMismatchError for a kind of cache that is not served, before anything is computed.
    """
    attention.install()
    caches = make_prompt_cache(model)
    lists = tuple(len(cache.caches) if isinstance(cache, CacheList) else None for cache in caches)
    leaves = [leaf for cache in caches for leaf in (cache.caches if isinstance(cache, CacheList) else [cache])]
    for leaf in leaves:
        _check_kind(leaf)
    model(mx.array([[0, 0]]), cache=caches)
    groups = _group([_look(leaf) for leaf in leaves])
    return ModelCacheSpec(groups, _arrays_only(model, groups, lists), lists)


def _check_kind(cache: Any) -> None:
    known = type(cache) in (KVCache, ChunkedKVCache, ArraysCache)
    if not known and not (type(cache) is RotatingKVCache and cache.keep == 0):
        raise ModelMismatchError(
            f"this model keeps its state in a {type(cache).__name__}, which amem does not serve",
            "full, sliding-window and chunked attention and recurrent states are served",
        )


def _look(cache: Any) -> LayerGroup:
    """A layer group of this one cache, which the probing pass has filled; its id and its place are still open."""
    if isinstance(cache, ArraysCache):
        if any(array is None for array in cache.cache):
            raise ModelMismatchError("this model has a recurrent layer that leaves a part of its state empty")
        states = tuple(Part(f"state.{i}", _DTYPES[a.dtype], tuple(a.shape)) for i, a in enumerate(cache.cache))
        return LayerGroup("", "recurrent", (), 0, 0, 0, states=states)
    if cache.keys is None:
        raise ModelMismatchError("this model has a layer that keeps no keys of its own, which amem does not serve yet")
    window = cache.max_size if isinstance(cache, RotatingKVCache) else None
    dims = cache.keys.shape[1], cache.keys.shape[3], cache.values.shape[3]
    return LayerGroup("", "full" if window is None else "window", (), *dims, window)


def _group(looks: Sequence[LayerGroup]) -> tuple[LayerGroup, ...]:
    """Caches that look alike, put together."""
    members: dict[LayerGroup, list[int]] = {}
    for place, look in enumerate(looks):
        members.setdefault(look, []).append(place)
    return tuple(
        LayerGroup(f"{g.kind}-{n}", g.kind, tuple(places), g.kv_heads, g.key_dim, g.value_dim, g.window, g.states)
        for n, (g, places) in enumerate(members.items())
    )


def _arrays_only(model: Module, groups: tuple[LayerGroup, ...], lists: Sequence[int | None]) -> frozenset[int]:
    """Caches whose layers trip over a handle; each failed probe finds one more."""
    found: set[int] = set()
    while True:
        cache = AgentCache(groups, CODECS[DEFAULT_CODEC], SlabPool(), frozenset(found), lists)
        try:
            model(mx.array([[0]]), cache=cache.layers)
        except (AttributeError, TypeError, ValueError):
            reached = [place for place, leaf in enumerate(cache.leaves) if isinstance(leaf, LayerCache) and leaf.offset]
            if not reached or reached[-1] in found:
                raise
            found.add(reached[-1])
        else:
            return frozenset(found)
