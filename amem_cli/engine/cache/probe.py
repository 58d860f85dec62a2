"""A model's layer groups, found by probing: from the caches that it makes, and from a few passes.

Nothing is known by model name. `make_cache` gives each layer's kind, a pass through those caches gives heads, dims and
states, and a decode step after a long past shows which layers pass their cache to attention as it is, which of them
keep latents, and which compute on their keys themselves. Graphs are built and never evaluated, so probing costs no
arithmetic, and no weight is read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, RotatingKVCache, make_prompt_cache

from amem_cli.engine.backend import mkl_rows
from amem_cli.engine.cache import attention
from amem_cli.engine.cache.agent_cache import CACHES, AgentCache, LayerCache
from amem_cli.engine.cache.attention_caches import FullCache, WindowCache
from amem_cli.engine.cache.block_cache import BlockCache
from amem_cli.engine.cache.layer_group_cache import LayerGroupCache
from amem_cli.engine.cache.slabs import SlabPool
from kvstore.errors import ModelMismatchError
from kvstore.format.codecs import CODECS, DEFAULT_CODEC, Codec
from kvstore.format.document import replace
from kvstore.format.layers import Kind, LayerGroup
from kvstore.format.parts import Dtype, Part

_DTYPES: dict[mx.Dtype, Dtype] = {mx.float32: "F32", mx.bfloat16: "BF16", mx.float16: "F16"}
# what a model's own code raises for what it is not made for
_FAILED = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_LONG = 1 << 16  # tokens: more than a sparse indexer lets a query see, so that it begins to choose


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

    Raises ModelMismatchError for a kind of cache that is not served, or a model that does not run on this machine,
    before anything is computed.
    """
    attention.install()
    mkl_rows.install()
    caches = make_prompt_cache(model)
    lists = tuple(len(cache.caches) if isinstance(cache, CacheList) else None for cache in caches)
    leaves = [leaf for cache in caches for leaf in (cache.caches if isinstance(cache, CacheList) else [cache])]
    for leaf in leaves:
        _check_kind(leaf)
    _pass(model, caches, 2)
    looks = {place: look for place, leaf in enumerate(leaves) if (look := _look(leaf))}
    states = {place: look for place, look in looks.items() if not look.layer_kind.has_blocks}
    if states:
        _pass(model, caches, 3)
        if states != {place: _look(leaves[place]) for place in states}:
            raise ModelMismatchError("this model has a state that grows with the text, which amem does not serve")
    return _probe(model, _group(looks), lists)


def _pass(model: Any, caches: Sequence[Any], tokens: int) -> None:
    """Build the graph of one pass. Raises ModelMismatchError where the model's own code cannot."""
    try:
        model(mx.zeros((1, tokens), dtype=mx.int32), cache=caches)
    except _FAILED as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ModelMismatchError(
            f"this model does not run here: {reason}", "mlx-lm alone does not run it on this machine either"
        ) from error


def _check_kind(cache: Any) -> None:
    known = type(cache) in (KVCache, ChunkedKVCache, ArraysCache)
    if not known and not (type(cache) is RotatingKVCache and cache.keep == 0):
        raise ModelMismatchError(
            f"this model keeps its state in a {type(cache).__name__}, which amem does not serve",
            "full, sliding-window and chunked attention and recurrent states are served",
        )


def _look(cache: Any) -> LayerGroup | None:
    """A layer group of this one cache, which the probing pass has filled; its id and its place are still open.

    None for a cache that the model makes and does not use.
    """
    if isinstance(cache, ArraysCache):
        return LayerGroup("", "recurrent", (), 0, 0, 0, states=_states(cache))
    if cache.keys is None:
        return None
    window = cache.max_size if isinstance(cache, RotatingKVCache) else None
    dims = cache.keys.shape[1], cache.keys.shape[3], cache.values.shape[3]
    return LayerGroup("", "full" if window is None else "window", (), *dims, window)


def _states(cache: ArraysCache) -> tuple[Part, ...]:
    if any(array is None for array in cache.cache):
        raise ModelMismatchError("this model has a recurrent layer that leaves a part of its state empty")
    other = {str(array.dtype) for array in cache.cache if array.dtype not in _DTYPES}
    if other:
        raise ModelMismatchError(f"this model has a state of {', '.join(sorted(other))}, which amem does not serve")
    return tuple(Part(f"state.{i}", _DTYPES[a.dtype], tuple(a.shape)) for i, a in enumerate(cache.cache))


def _group(looks: dict[int, LayerGroup]) -> tuple[LayerGroup, ...]:
    """Equal caches, grouped."""
    members: dict[LayerGroup, list[int]] = {}
    for place, look in looks.items():
        members.setdefault(look, []).append(place)
    return tuple(
        replace(look, id=f"{look.kind}-{n}", layers=tuple(places)) for n, (look, places) in enumerate(members.items())
    )


class _LongPast(BlockCache):
    """A layer group after `_LONG` tokens, which exist in the graph only: they take no memory."""

    held_blocks = 0

    def past(self, layer: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:  # noqa: ARG002
        lead = (1, self.group.kv_heads, self.offset - self.group.first_needed(self.offset))
        return mx.zeros((*lead, self.group.key_dim), dtype), mx.zeros((*lead, self.group.value_dim), dtype)


class _LongFull(_LongPast, FullCache):
    pass


class _LongWindow(_LongPast, WindowCache):
    pass


LONG_CACHES: Mapping[Kind, type[LayerGroupCache]] = {**CACHES, "full": _LongFull, "window": _LongWindow}


def _probe(model: Any, groups: tuple[LayerGroup, ...], lists: tuple[int | None, ...]) -> ModelCacheSpec:
    """Find out how each group is read in decode. A step that fails excludes one way of reading for one group.

    A group that fails with a handle for its keys and values, and may be latents, is tried with a handle for latents.
    A group that fails with that too, or cannot be latents, gets arrays.
    """
    arrays_only: frozenset[int] = frozenset()
    while True:
        cache = AgentCache(groups, CODECS[DEFAULT_CODEC], SlabPool(), arrays_only, lists, LONG_CACHES)
        cache.offset = _LONG
        try:
            model(mx.zeros((1, 1), dtype=mx.int32), cache=cache.layers)
        except _FAILED:
            reached = [i for i, leaf in enumerate(cache.leaves) if isinstance(leaf, LayerCache) and leaf.offset > _LONG]
            by_handle = [place for place in reached if place not in arrays_only]
            if not by_handle:
                raise
            failed = next(group for group in groups if by_handle[-1] in group.layers)
            if (latents := replace(failed, latent=True)) != failed and _may_be_latents(failed):
                groups = tuple(latents if group is failed else group for group in groups)
            else:
                arrays_only |= frozenset(failed.layers)
        else:
            return ModelCacheSpec(groups, arrays_only, lists)


def _may_be_latents(group: LayerGroup) -> bool:
    """Whether the sizes are those of latents.

    Multi-head latent attention in mlx-lm stores one head of latents as keys, and the smaller rotated part of the keys
    as values, and computes on both.
    """
    return group.kv_heads == 1 and 0 < group.value_dim < group.key_dim
