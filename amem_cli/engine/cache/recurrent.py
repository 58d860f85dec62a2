"""The cache of recurrent layers: state-space models, linear attention, short convolutions.

A recurrent state summarizes all tokens before it and cannot be cut: the tail of each committed state keeps it in full
precision, for that position only. The model reads and writes it through mlx-lm's own `ArraysCache`.
"""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache

from amem_cli.engine.cache.layer_group_cache import LayerGroupCache, TailArray
from amem_cli.engine.cache.slabs import SlabPool, part_bytes
from kvstore.format.codecs import Codec
from kvstore.format.layers import LayerGroup, state_parts
from kvstore.format.parts import Part


class RecurrentCache(LayerGroupCache):
    """The states of one group of recurrent layers; `layers` is what the model is called with."""

    def __init__(self, group: LayerGroup, codec: Codec, pool: SlabPool) -> None:
        super().__init__(group, codec, pool)
        self.layers = [ArraysCache(len(group.states)) for _ in group.layers]

    @classmethod
    def footprint(cls, group: LayerGroup, codec: Codec, tokens: int) -> int:  # noqa: ARG003
        return part_bytes(state_parts(group))

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._arrays())

    def _arrays(self) -> list[mx.array]:
        """All state arrays; none before the first pass."""
        return [array for layer in self.layers for array in layer.cache if array is not None]

    def gather(self) -> list[mx.array]:
        """The states after this pass, each a contiguous array of its own. Nothing is evaluated yet.

        A model often leaves a slice of a larger array: that array would stay in memory, and the slice would have
        another layout than a state from the store.
        """
        for layer in self.layers:
            layer.cache = [mx.contiguous(array) for array in layer.cache]
        return self._arrays()

    def tail(self, block: int, tokens: int) -> list[TailArray]:  # noqa: ARG002
        """Each state of all layers, [layers, *one layer's shape], in file order."""
        return [
            np.stack([_to_host(layer.cache[i], part) for layer in self.layers])
            for i, part in enumerate(self.group.states)
        ]

    def load_tail(self, block: int, tokens: int, arrays: Sequence[TailArray]) -> None:  # noqa: ARG002
        for place, layer in enumerate(self.layers):
            layer.cache = [_to_mlx(array[place], part) for array, part in zip(arrays, self.group.states, strict=True)]

    def forget(self) -> None:
        """Nothing to drop: a pass changes the states in place, so the agent cannot be used after one that failed."""

    def release(self) -> None:
        """MLX frees the states with this object."""


def _to_host(state: mx.array, part: Part) -> TailArray:
    host: TailArray = np.array(state.view(mx.uint16) if part.dtype == "BF16" else state)
    return host


def _to_mlx(state: TailArray, part: Part) -> mx.array:
    array = mx.array(state)
    return array.view(mx.bfloat16) if part.dtype == "BF16" else array
