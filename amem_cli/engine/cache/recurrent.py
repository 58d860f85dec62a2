"""The states of recurrent layers: state-space models, linear attention, short convolutions.

A state stands for all tokens before it and cannot be cut: it is kept in full precision, with the tail of each
committed state, and is valid at that position only. The model reads and writes it through mlx-lm's own `ArraysCache`.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import ArraysCache

from kvstore.format.layers import LayerGroup
from kvstore.format.parts import Part

StateArray = npt.NDArray[Any]  # float32, float16, or bfloat16 as uint16


class RecurrentCache:
    """The states of one group of recurrent layers; `layers` is what the model is called with."""

    def __init__(self, group: LayerGroup) -> None:
        self.group = group
        self.offset = 0  # tokens that the states stand for
        self.layers = [ArraysCache(len(group.states)) for _ in group.layers]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._arrays())

    def _arrays(self) -> list[mx.array]:
        """All state arrays that there are; none before the first pass."""
        return [array for layer in self.layers for array in layer.cache if array is not None]

    def gather(self) -> list[mx.array]:
        """The states that this pass leaves, each whole and by itself. Nothing is evaluated yet.

        What a model leaves is often cut out of a larger array: that would stay in memory, and would be laid out
        otherwise than a state that comes from the store.
        """
        for layer in self.layers:
            layer.cache = [mx.contiguous(array) for array in layer.cache]
        return self._arrays()

    def tail(self) -> list[StateArray]:
        """Each state of all layers, [layers, *one layer's shape], in file order."""
        return [
            np.stack([_to_host(layer.cache[i], part) for layer in self.layers])
            for i, part in enumerate(self.group.states)
        ]

    def load_tail(self, arrays: Sequence[StateArray]) -> None:
        """Put back what `tail` gave."""
        for place, layer in enumerate(self.layers):
            layer.cache = [_to_mlx(array[place], part) for array, part in zip(arrays, self.group.states, strict=True)]


def _to_host(state: mx.array, part: Part) -> StateArray:
    host: StateArray = np.array(state.view(mx.uint16) if part.dtype == "BF16" else state)
    return host


def _to_mlx(state: StateArray, part: Part) -> mx.array:
    array = mx.array(state)
    return array.view(mx.bfloat16) if part.dtype == "BF16" else array
