"""One decode step for several agents: linear layers run once for all rows, attention runs for each row.

A row is an agent's own cache. Nothing is padded, merged, split or copied, so agents join and leave between any two
steps, and a row's result depends on the other rows only by float rounding. Some models run one row at a time: those
that cannot take an offset for each row (they do integer arithmetic on it), and those with latents, recurrent layers
or layers that compute on the keys themselves.
"""

from collections.abc import Sequence

import mlx.core as mx
from mlx.nn.layers.base import Module

from amem_cli.engine.cache.agent_cache import AgentCache, Handle, LayerCache, RowHandles, RowMasks, settle
from amem_cli.engine.cache.feeder import Feeder
from amem_cli.engine.cache.probe import ModelCacheSpec
from amem_cli.engine.cache.slabs import SlabPool
from kvstore.format.codecs import CODECS, DEFAULT_CODEC
from kvstore.format.feeds import add_feed


class _RowsLayer:
    """What the model sees as one layer's cache, with a row for each agent."""

    def __init__(self, rows: Sequence[LayerCache]) -> None:
        self._rows = rows

    @property
    def offset(self) -> mx.array:
        """Each row's offset: int32 [rows]."""
        return mx.array([row.offset for row in self._rows])

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[RowHandles, RowHandles]:
        """Hand each row its own keys and values, [rows, heads, 1, dim]."""
        handles = []
        for i, row in enumerate(self._rows):
            handle, _ = row.update_and_fetch(keys[i : i + 1], values[i : i + 1])
            assert isinstance(handle, Handle)
            handles.append(handle)
        both = RowHandles(handles)
        return both, both

    def make_mask(
        self,
        N: int,  # noqa: N803 (mlx-lm's name)
        window_size: int | None = None,
        return_array: bool = False,
    ) -> RowMasks | None:
        """The rows' masks; None where none of them needs one."""
        masks = [row.make_mask(N, window_size, return_array) for row in self._rows]
        return None if all(mask is None for mask in masks) else RowMasks(masks)


class DecodeBatch:
    """Several agents' caches, as the model is called with for one decode step."""

    def __init__(self, rows: Sequence[AgentCache]) -> None:
        self.rows = rows
        self.layers = [_RowsLayer(leaves) for leaves in zip(*(row.leaves for row in rows), strict=True)]

    def forget(self) -> None:
        """Drop what a failed step has handed to the rows, as if it had not begun."""
        for row in self.rows:
            row.forget()


def decode_together(model: Module, feeders: Sequence[Feeder], tokens: Sequence[int]) -> list[mx.array]:
    """One step: each agent's token is fed. Returns each one's logits [vocabulary] in float32."""
    batch = DecodeBatch([feeder.cache for feeder in feeders])
    try:
        out = model(mx.array([[token] for token in tokens]), cache=batch.layers)
        logits = [out[i, -1].astype(mx.float32) for i in range(len(feeders))]
        del out
        settle(batch.rows, 1, *logits)
    except BaseException:
        batch.forget()
        raise
    for feeder in feeders:
        feeder.feeds = add_feed(feeder.feeds, 1)
    return logits


def can_batch(model: Module, spec: ModelCacheSpec) -> bool:
    """Whether the model takes several rows, found by describing a step of two. Nothing is evaluated."""
    if spec.arrays_only or any(n is not None for n in spec.lists):
        return False
    if not all(group.joins_decode_batch for group in spec.groups):
        return False
    pool = SlabPool()
    rows = [spec.new_cache(CODECS[DEFAULT_CODEC], pool) for _ in range(2)]
    try:
        out = model(mx.array([[0], [0]]), cache=DecodeBatch(rows).layers)
    except (AttributeError, TypeError, ValueError):
        return False
    return bool(out.shape[0] == 2)
