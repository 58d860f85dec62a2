"""The caches of attention layers: slabs that grow in number for full attention, one ring of blocks for a window."""

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import create_attention_mask, create_causal_mask

from amem_cli.engine.cache.block_cache import BlockCache
from amem_cli.engine.cache.slabs import MAX_BLOCKS, SLAB_BYTES, Slab, part_bytes
from kvstore.format.codecs import Codec
from kvstore.format.layers import LayerGroup, quantized_parts
from kvstore.format.parts import BLOCK_TOKENS


class FullCache(BlockCache):
    """Full attention: all blocks are kept, in as many slabs as they need. Full slabs can be shared."""

    @classmethod
    def slab_blocks(cls, group: LayerGroup, codec: Codec) -> int:
        nbytes = part_bytes(quantized_parts(group, codec))
        blocks = MAX_BLOCKS
        while blocks > 1 and blocks * nbytes > SLAB_BYTES:
            blocks //= 2
        return blocks

    @classmethod
    def slab_count(cls, group: LayerGroup, codec: Codec, blocks: int) -> int:
        return -(-blocks // cls.slab_blocks(group, codec))

    @property
    def held_blocks(self) -> int:
        return self._begun_blocks

    def shareable(self, position: int) -> list[range]:
        per_slab = self.slab_blocks(self.group, self.codec)
        last = position // BLOCK_TOKENS - per_slab
        return [range(first, first + per_slab) for first in range(0, last + 1, per_slab)]

    def mask(self, tokens: int, window: int | None, as_array: bool) -> mx.array | str | None:
        if tokens == 1 and (window is None or self.offset < window):
            return None
        mask: mx.array | str | None = create_attention_mask(tokens, self.offset, as_array, window)
        return mask

    def _place(self, block: int) -> tuple[Slab, int]:
        while block >= self._capacity:
            self.slabs.append(self._pool.take(self._shape(first=not self.slabs)))
        per_slab = self.slabs[0].blocks
        return self.slabs[block // per_slab], block % per_slab

    def _block_of_each_slot(self) -> npt.NDArray[np.int64]:
        return np.arange(self.held_blocks)


class WindowCache(BlockCache):
    """Sliding-window attention: one slab, used as a ring, holds the blocks that the window can touch."""

    @classmethod
    def slab_blocks(cls, group: LayerGroup, codec: Codec) -> int:  # noqa: ARG003
        return ring_blocks(_window(group))

    @classmethod
    def slab_count(cls, group: LayerGroup, codec: Codec, blocks: int) -> int:  # noqa: ARG003
        return min(blocks, 1)

    @property
    def held_blocks(self) -> int:
        return min(self._begun_blocks, self._capacity)

    def shareable(self, position: int) -> list[range]:  # noqa: ARG002 (a ring is written to for as long as it lives)
        return []

    def mask(self, tokens: int, window: int | None, as_array: bool) -> mx.array | str | None:
        own = _window(self.group)
        visible, held = window or own, min(own - 1, self.offset)
        if held + tokens > visible or as_array:
            # one token that may see all that is held needs no mask
            return create_causal_mask(tokens, held, window_size=visible) if tokens > 1 or visible < own else None
        return "causal" if tokens > 1 else None

    def _place(self, block: int) -> tuple[Slab, int]:
        if not self.slabs:
            self.slabs.append(self._pool.take(self._shape(first=True)))
        return self.slabs[0], block % self.slabs[0].blocks

    def _block_of_each_slot(self) -> npt.NDArray[np.int64]:
        slots = np.arange(self.held_blocks)
        if not slots.size:
            return slots
        last = (self.quantized - 1) // BLOCK_TOKENS
        return last - (last - slots) % self.slabs[0].blocks


def ring_blocks(window: int) -> int:
    """Blocks that hold the `window` - 1 tokens before any token of a block, and that block itself."""
    return -(-(window - 1) // BLOCK_TOKENS) + 1


def _window(group: LayerGroup) -> int:
    assert group.window is not None
    return group.window
