"""What the caches of all layer kinds have in common: one layer group of one agent.

`agent_cache.CACHES` has the class of each layer kind.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from amem_cli.engine.cache.slabs import SlabPool
from kvstore.format.codecs import Codec
from kvstore.format.layers import LayerGroup

TailArray = npt.NDArray[Any]  # as the host sees a part: bfloat16 as uint16


class LayerGroupCache(ABC):
    """The cache of one layer group: what its layers keep of `offset` tokens."""

    def __init__(self, group: LayerGroup, codec: Codec, pool: SlabPool) -> None:
        self.group = group
        self.codec = codec
        self.offset = 0
        self._pool = pool

    @classmethod
    @abstractmethod
    def footprint(cls, group: LayerGroup, codec: Codec, tokens: int) -> int:
        """Bytes that a cache of `tokens` tokens takes in memory."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that this one takes."""

    @abstractmethod
    def tail(self, block: int, tokens: int) -> list[TailArray]:
        """What a tail file of `tokens` tokens, from block number `block` on, holds of this group, in file order."""

    @abstractmethod
    def load_tail(self, block: int, tokens: int, arrays: Sequence[TailArray]) -> None:
        """Put back what `tail` returned."""

    @abstractmethod
    def forget(self) -> None:
        """Drop the keys and values of a pass that failed. Recurrent state cannot be restored."""

    @abstractmethod
    def release(self) -> None:
        """Free all memory; the cache must not be used any more."""
