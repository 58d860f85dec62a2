"""Memory for blocks: slabs that are allocated once, never grow, and are used again.

A slab holds a few blocks of one layer group, block-major, so that a block on disk is one contiguous slot of each
part. Only host writes change a slab, through its NumPy views, and only after the pass that read it is evaluated: a
slice write by MLX would copy the whole buffer while anything still holds it and leave the view stale. bfloat16 has
no NumPy type, so those parts are allocated as uint16 and seen by MLX through a view of the same memory.

A slab has one writer until all of its blocks are full. From then on nothing changes it, and agents of one domain that
have those blocks in common may share it.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from amem_cli.engine.backend.huge_pages import zeros
from amem_cli.engine.cache.codec import Quantized
from kvstore.format.codecs import Codec
from kvstore.format.layers import LayerGroup, quantized_parts, recent_parts, refined_parts, state_parts
from kvstore.format.parts import BLOCK_TOKENS, GROUP_TOKENS, Part

SLAB_BYTES = 64 << 20
MAX_BLOCKS = 16

HostArray = npt.NDArray[np.uint32] | npt.NDArray[np.uint16]


def host_view(array: mx.array) -> HostArray:
    """A writable NumPy view of an evaluated uint16 or uint32 array; the memory is shared."""
    view: HostArray = np.array(array, copy=False)
    return view


class Buffer:
    """One array that MLX reads and the host writes."""

    def __init__(self, part: Part, lead: tuple[int, ...] = ()) -> None:
        storage = zeros((*lead, *part.shape), mx.uint32 if part.dtype == "U32" else mx.uint16)
        self.array = storage.view(mx.bfloat16) if part.dtype == "BF16" else storage
        mx.eval(self.array)
        self.host = host_view(storage)


class Slab:
    """`blocks` blocks of quantized keys and values: for each of `parts` a buffer [blocks, *part's shape].

    `rest`, a slab of one slot, holds what refines the first block.
    """

    def __init__(self, parts: Sequence[Part], blocks: int, rest: "Slab | None" = None) -> None:
        self.blocks = blocks
        self.buffers = {part.name: Buffer(part, (blocks,)) for part in parts}
        self.rest = rest
        own = sum(buffer.host.nbytes for buffer in self.buffers.values())
        self.nbytes: int = own + (rest.nbytes if rest else 0)
        self.users = 1
        self.key: Hashable = None  # what it is shared under; until then one agent fills it

    def keys(self, slots: slice, layer: int) -> Quantized:
        """The keys of one layer in some slots: [slots, heads, rows, ...]."""
        return self._read("k", slots, layer)

    def values(self, slots: slice, layer: int) -> Quantized:
        """The values of one layer in some slots: [slots, heads, rows, ...]."""
        return self._read("v", slots, layer)

    def _read(self, name: str, slots: slice, layer: int) -> Quantized:
        names = (f"{name}.packed", f"{name}.scales", f"{name}.biases")
        return Quantized(*(self.buffers[n].array[slots, layer] for n in names))

    def slot(self, index: int) -> list[HostArray]:
        """The host's views of one block, a contiguous array for each part, in file order."""
        return [buffer.host[index] for buffer in self.buffers.values()]

    def clear(self) -> None:
        """Wipe it, so that the next user of this memory cannot see what the last one held."""
        self.users, self.key = 1, None
        for buffer in self.buffers.values():
            buffer.host.fill(0)
        if self.rest:
            self.rest.clear()


def slab_blocks(group: LayerGroup, codec: Codec) -> int:
    """How many blocks a slab of this layer group has.

    A function of the shapes alone, since the order in which blocks enter the graph follows from it. For a window it
    is the number of blocks that the window can touch, and the slab is used as a ring.
    """
    if group.window is not None:
        return ring_blocks(group.window)
    nbytes = _nbytes(quantized_parts(group, codec))
    blocks = MAX_BLOCKS
    while blocks > 1 and blocks * nbytes > SLAB_BYTES:
        blocks //= 2
    return blocks


def slab_bytes(group: LayerGroup, codec: Codec) -> int:
    """Bytes of a slab, without what refines the first one."""
    return slab_blocks(group, codec) * _nbytes(quantized_parts(group, codec))


def _nbytes(parts: Iterable[Part]) -> int:
    return sum(part.nbytes for part in parts)


def ring_blocks(window: int, block: int = 256) -> int:
    """Blocks that hold the `window` - 1 tokens before any token of a block, and that block itself."""
    return -(-(window - 1) // block) + 1


class SlabPool:
    """All memory of agents' caches: the slabs that are shared, and those that are not in use, by shape.

    Memory that was touched before is filled several times as fast. With a `limit`, free slabs are given up before it
    would be passed.
    """

    def __init__(self) -> None:
        self.limit: int | None = None  # bytes
        self.nbytes = 0  # of all buffers that there are, slabs not in use included
        self._free: dict[tuple[LayerGroup, Codec, bool], list[Slab]] = defaultdict(list)
        self._shared: dict[Hashable, Slab] = {}

    def take(self, group: LayerGroup, codec: Codec, first: bool, key: Hashable = None) -> Slab:
        """The slab that is shared under `key`, else one of zeros for this layer group, pooled or new.

        `first`: it holds the first block.
        """
        if key in self._shared:
            self._shared[key].users += 1
            return self._shared[key]
        refined = first and bool(refined_parts(group, codec))
        free = self._free[group, codec, refined]
        if free:
            return free.pop()
        self.count(slab_bytes(group, codec) + refined * _nbytes(refined_parts(group, codec)))
        rest = Slab(quantized_parts(group, codec, codec.refined), 1) if refined else None
        return Slab(quantized_parts(group, codec), slab_blocks(group, codec), rest)

    def share(self, group: LayerGroup, codec: Codec, slab: Slab, key: Hashable) -> Slab:
        """Share a full slab under a key that stands for its bytes, and its domain. Returns the one to be used.

        That is another one where an agent was first; `slab` is given back then.
        """
        first = self._shared.setdefault(key, slab)
        first.key = key
        if first is not slab:
            first.users += 1
            self.give(group, codec, slab)
        return first

    def give(self, group: LayerGroup, codec: Codec, slab: Slab) -> None:
        """Put back a slab whose last reader is evaluated; others may still use it.

        It is wiped here: who takes it is in more of a hurry.
        """
        slab.users -= 1
        if slab.users:
            return
        self._shared.pop(slab.key, None)
        slab.clear()
        self._free[group, codec, slab.rest is not None].append(slab)

    def count(self, nbytes: int) -> None:
        """Say that so many bytes are allocated, or given up where it is less than zero."""
        if self.limit is not None and self.nbytes + nbytes > self.limit:
            self._trim(self.nbytes + nbytes - self.limit)
        self.nbytes += nbytes

    def _trim(self, nbytes: int) -> None:
        """Give up free slabs until so many bytes are free."""
        for slabs in self._free.values():
            while slabs and nbytes > 0:
                freed = slabs.pop().nbytes
                self.nbytes -= freed
                nbytes -= freed
        mx.clear_cache()


def footprint(groups: Sequence[LayerGroup], codec: Codec, tokens: int) -> int:
    """Bytes that a cache of `tokens` tokens takes in memory: whole slabs, what refines them, recent tokens, states."""
    total = 0
    for group in groups:
        blocks = -(-(tokens - tokens % GROUP_TOKENS) // BLOCK_TOKENS)
        if blocks and group.kind != "recurrent":
            slabs = 1 if group.window is not None else -(-blocks // slab_blocks(group, codec))
            total += slabs * slab_bytes(group, codec) + _nbytes(refined_parts(group, codec))
        total += _nbytes((*recent_parts(group, GROUP_TOKENS), *state_parts(group)))
    return total
