"""Memory for blocks: slabs that are allocated once, never grow, and are used again.

A slab holds a few blocks of one layer group, block-major, so that a block on disk is one contiguous slot of each
part. Only host writes change a slab, through its NumPy views, and only after the pass that read it is evaluated: a
slice write by MLX would copy the whole buffer while anything still holds it and leave the view stale. bfloat16 has
no NumPy type, so those parts are allocated as uint16 and seen by MLX through a view of the same memory.

A slab has one writer until all of its blocks are full. From then on it is immutable, and agents of one domain that have
those blocks in common may share it.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from amem_cli.engine.backend.huge_pages import zeros
from amem_cli.engine.cache.codec import Quantized
from kvstore.format.codecs import Axis, Codec
from kvstore.format.layers import LayerGroup, quantized_parts
from kvstore.format.parts import BLOCK_TOKENS, GROUP_TOKENS, Part

SLAB_BYTES = 64 << 20
MAX_BLOCKS = 16

HostArray = npt.NDArray[np.uint32] | npt.NDArray[np.uint16]


def host_view(array: mx.array) -> HostArray:
    """A writable NumPy view of an evaluated uint16 or uint32 array; the memory is shared."""
    view: HostArray = np.array(array, copy=False)
    return view


def put(arrays: Sequence[mx.array], targets: Sequence[HostArray]) -> None:
    """Copy evaluated arrays into the host's views of slabs."""
    for target, array in zip(targets, arrays, strict=True):
        target[...] = to_host(array)


def to_host(array: mx.array) -> HostArray:
    """An evaluated array as the host sees it: bfloat16 as uint16."""
    return host_view(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def group_slice(part: HostArray, axis: Axis, start: int, stop: int) -> HostArray:
    """Groups `start` to `stop` of a block's part: the tokens are its last axis or the one before."""
    if axis == "channel":
        return part[..., start * GROUP_TOKENS : stop * GROUP_TOKENS, :]
    per_group = part.shape[-1] * GROUP_TOKENS // BLOCK_TOKENS
    return part[..., start * per_group : stop * per_group]


class Buffer:
    """One array that MLX reads and the host writes."""

    def __init__(self, part: Part, lead: tuple[int, ...] = ()) -> None:
        storage = zeros((*lead, *part.shape), mx.uint32 if part.dtype == "U32" else mx.uint16)
        self.array = storage.view(mx.bfloat16) if part.dtype == "BF16" else storage
        mx.eval(self.array)
        self.host = host_view(storage)


@dataclass(frozen=True)
class SlabShape:
    """What a slab holds: `blocks` blocks of a layer group; `refined`: the codes that refine the first block, too.

    `tokens`: those in a block; a slab of refining codes has fewer.
    """

    group: LayerGroup
    codec: Codec
    blocks: int
    refined: bool = False
    tokens: int = BLOCK_TOKENS

    @property
    def parts(self) -> list[Part]:
        """The parts of one block."""
        return quantized_parts(self.group, self.codec, self.tokens)

    @property
    def rest(self) -> "SlabShape | None":
        """The shape of the slab, of one slot, that refines the first block."""
        return SlabShape(self.group, self.codec, 1, tokens=self.codec.refined) if self.refined else None

    @property
    def nbytes(self) -> int:
        rest = self.rest
        return self.blocks * part_bytes(self.parts) + (rest.nbytes if rest else 0)


def part_bytes(parts: Iterable[Part]) -> int:
    """Bytes of some parts."""
    return sum(part.nbytes for part in parts)


class Slab:
    """Quantized keys and values of some blocks: for each part of a block a buffer [blocks, *part's shape].

    `rest`, a slab of one slot, holds the second layer of codes of the first block.
    """

    def __init__(self, shape: SlabShape) -> None:
        self.shape = shape
        self.blocks = shape.blocks
        self.buffers = {part.name: Buffer(part, (shape.blocks,)) for part in shape.parts}
        self.rest = Slab(shape.rest) if shape.rest else None
        self.nbytes = shape.nbytes
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


@dataclass(frozen=True)
class SideReader:
    """How attention reads the keys or the values of a layer group: codes from slabs, and recent tokens.

    read(slab, slots, layer): [slots, heads, rows, ...] along `axis`; recent: [layers, heads, 64, dim] bfloat16.
    """

    read: Callable[[Slab, slice, int], Quantized]
    axis: Axis
    recent: Buffer


class SlabPool:
    """All memory of agents' caches: shared slabs by key, and free slabs by shape.

    Memory that was touched before is filled several times as fast. With a `limit`, free slabs are dropped before it
    would be exceeded.
    """

    def __init__(self) -> None:
        self.limit: int | None = None  # bytes
        self.nbytes = 0  # of all existing buffers, free slabs included
        self._free: dict[SlabShape, list[Slab]] = defaultdict(list)
        self._shared: dict[Hashable, Slab] = {}

    def take(self, shape: SlabShape, key: Hashable = None) -> Slab:
        """The slab that is shared under `key`, else one of zeros, free or new."""
        if key in self._shared:
            self._shared[key].users += 1
            return self._shared[key]
        free = self._free[shape]
        if free:
            return free.pop()
        self.count(shape.nbytes)
        return Slab(shape)

    def share(self, slab: Slab, key: Hashable) -> Slab:
        """Share a full slab under a key that identifies its bytes and its domain. Returns the one to be used.

        If another agent shared the same one before, that is the one; `slab` is given back.
        """
        first = self._shared.setdefault(key, slab)
        first.key = key
        if first is not slab:
            first.users += 1
            self.give(slab)
        return first

    def give(self, slab: Slab) -> None:
        """Give back a slab that no unevaluated pass reads; others may still use it.

        It is wiped here, not in `take`, which delays a turn.
        """
        slab.users -= 1
        if slab.users:
            return
        self._shared.pop(slab.key, None)
        slab.clear()
        self._free[slab.shape].append(slab)

    def count(self, nbytes: int) -> None:
        """Note that so many bytes are allocated, or freed if negative."""
        if self.limit is not None and self.nbytes + nbytes > self.limit:
            self._trim(self.nbytes + nbytes - self.limit)
        self.nbytes += nbytes

    def _trim(self, nbytes: int) -> None:
        """Drop free slabs until so many bytes are free."""
        for slabs in self._free.values():
            while slabs and nbytes > 0:
                freed = slabs.pop().nbytes
                self.nbytes -= freed
                nbytes -= freed
        mx.clear_cache()
