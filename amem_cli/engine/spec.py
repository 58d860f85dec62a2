"""What a model's cache is made of, found by looking: the caches it makes, and one probing pass.

Nothing is known by model name. `make_cache` tells each layer's kind, a pass through recording caches tells heads and
dims, and a decode step through the real cache tells which layers compute on the keys themselves instead of handing
them to attention. Graphs are built and never evaluated, so probing costs no arithmetic.
"""

from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from amem_cli.engine import attention
from amem_cli.engine.cache import AgentCache
from amem_cli.engine.slab import SlabPool
from kvstore.errors import ModelMismatchError
from kvstore.shapes import CODECS, DEFAULT_CODEC, Codec, LayerGroup

Kind = Literal["full", "window"]


@dataclass(frozen=True)
class ModelCacheSpec:
    """A model's layer groups, and the layers that need plain arrays in decode too."""

    groups: tuple[LayerGroup, ...]
    arrays_only: frozenset[int]

    def new_cache(self, codec: Codec, pool: SlabPool) -> AgentCache:
        """An empty cache for one agent."""
        return AgentCache(self.groups, codec, pool, self.arrays_only)


def describe(model: Module) -> ModelCacheSpec:
    """Find a model's layer groups.

    Raises ModelMismatchError for a kind of cache that is not served, before anything is computed.
    """
    attention.install()
    caches = make_prompt_cache(model)
    kinds = [_kind(cache) for cache in caches]
    model(mx.array([[0, 0]]), cache=caches)
    groups = _group([(*kind, *_shape(cache)) for kind, cache in zip(kinds, caches, strict=True)])
    return ModelCacheSpec(groups, _arrays_only(model, groups))


def _kind(cache: Any) -> tuple[Kind, int | None]:
    if type(cache) is KVCache:
        return "full", None
    if type(cache) is RotatingKVCache and cache.keep == 0:
        return "window", cache.max_size
    raise ModelMismatchError(
        f"this model keeps its state in a {type(cache).__name__}, which amem does not serve yet",
        "full and sliding-window attention are served; `amem doctor` lists what is",
    )


def _shape(cache: Any) -> tuple[int, int, int]:
    """Heads, key dim and value dim of a layer, from the cache that it has filled."""
    if cache.keys is None:
        raise ModelMismatchError("this model has a layer that keeps no keys of its own, which amem does not serve yet")
    return cache.keys.shape[1], cache.keys.shape[3], cache.values.shape[3]


def _group(layers: list[tuple[Kind, int | None, int, int, int]]) -> tuple[LayerGroup, ...]:
    members: dict[tuple[Kind, int | None, int, int, int], list[int]] = {}
    for place, look in enumerate(layers):
        members.setdefault(look, []).append(place)
    return tuple(
        LayerGroup(f"{kind}-{n}", kind, tuple(places), kv_heads, key_dim, value_dim, window)
        for n, ((kind, window, kv_heads, key_dim, value_dim), places) in enumerate(members.items())
    )


def _arrays_only(model: Module, groups: tuple[LayerGroup, ...]) -> frozenset[int]:
    """Layers that trip over a handle; each failed probe finds one more."""
    found: set[int] = set()
    for _ in range(sum(len(group.layers) for group in groups) + 1):
        cache = AgentCache(groups, CODECS[DEFAULT_CODEC], SlabPool(), frozenset(found))
        try:
            model(mx.array([[0]]), cache=cache.layers)
        except (AttributeError, TypeError, ValueError):
            reached = [place for place, layer in enumerate(cache.layers) if layer.offset]
            if not reached or reached[-1] in found:
                raise
            found.add(reached[-1])
        else:
            return frozenset(found)
    raise AssertionError("a probe failed more often than there are layers")
