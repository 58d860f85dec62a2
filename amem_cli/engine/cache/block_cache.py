"""The cache of one layer group that stores blocks: quantized blocks, recent tokens, and the pass under way.

If the codec refines the first tokens, `rest` holds a second layer of codes: of what the block's own codes leave over.
Keys, scores and outputs are sums over both.
"""

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from amem_cli.engine.cache.codec import Quantized, axes_of, join_slots, left_over, quantize
from amem_cli.engine.cache.layer_group_cache import LayerGroupCache, TailArray
from amem_cli.engine.cache.slabs import (
    Buffer,
    HostArray,
    SideReader,
    Slab,
    SlabPool,
    SlabShape,
    group_slice,
    part_bytes,
    put,
)
from kvstore.format.codecs import Axis, Codec
from kvstore.format.layers import LayerGroup, recent_parts, refined_parts
from kvstore.format.parts import BLOCK_TOKENS, GROUP_TOKENS


class BlockCache(LayerGroupCache):
    """Quantized blocks in slabs, and up to 63 recent tokens in bfloat16. A subclass places the blocks in slabs."""

    def __init__(self, group: LayerGroup, codec: Codec, pool: SlabPool) -> None:
        super().__init__(group, codec, pool)
        self.axes = axes_of(group, codec)
        self.slabs: list[Slab] = []
        self.fresh: dict[int, tuple[mx.array, mx.array]] = {}  # layer's place in the group → this pass's k and v
        self._columns: npt.NDArray[np.int64] | None = None
        self._visible: mx.array | None = None
        # recent.k, recent.v: [layers, heads, 64, dim]
        recent = recent_parts(group, GROUP_TOKENS)
        pool.count(part_bytes(recent))
        self.recent_k, self.recent_v = (Buffer(part) for part in recent)
        self.keys = SideReader(Slab.keys, self.axes.keys, self.recent_k)
        self.values = self.keys if group.latent else SideReader(Slab.values, self.axes.values, self.recent_v)

    @classmethod
    @abstractmethod
    def slab_blocks(cls, group: LayerGroup, codec: Codec) -> int:
        """Blocks in a slab. It depends on shapes alone, since the order of blocks in the graph follows from it."""

    @classmethod
    @abstractmethod
    def slab_count(cls, group: LayerGroup, codec: Codec, blocks: int) -> int:
        """How many slabs a cache of `blocks` blocks has, the open one included."""

    @classmethod
    def footprint(cls, group: LayerGroup, codec: Codec, tokens: int) -> int:
        recent = part_bytes(recent_parts(group, GROUP_TOKENS))
        blocks = -(-(tokens - tokens % GROUP_TOKENS) // BLOCK_TOKENS)
        if not blocks:
            return recent
        shape = SlabShape(group, codec, cls.slab_blocks(group, codec))
        return cls.slab_count(group, codec, blocks) * shape.nbytes + part_bytes(refined_parts(group, codec)) + recent

    @property
    @abstractmethod
    def held_blocks(self) -> int:
        """Blocks in memory, the open one included."""

    @abstractmethod
    def shareable(self, position: int) -> list[range]:
        """The numbers of the blocks in each slab that is full at `position` and can be shared."""

    @abstractmethod
    def mask(self, tokens: int, window: int | None, as_array: bool) -> mx.array | str | None:
        """The mask of a pass of `tokens` tokens, over the past and itself, oldest first. `window`: the model's own."""

    @abstractmethod
    def _place(self, block: int) -> tuple[Slab, int]:
        """The slab and slot of a block, allocated if need be."""

    @abstractmethod
    def _block_of_each_slot(self) -> npt.NDArray[np.int64]:
        """The number of the block in each slot in use, in the order of `used_slots`."""

    @property
    def holds_latents(self) -> bool:
        """Whether its keys are values, too."""
        return self.values is self.keys

    @property
    def quantized(self) -> int:
        """Tokens that are in blocks; the others are recent."""
        return self.offset - self.offset % GROUP_TOKENS

    @property
    def _begun_blocks(self) -> int:
        return -(-self.quantized // BLOCK_TOKENS)

    @property
    def nbytes(self) -> int:
        slabs = sum(slab.nbytes for slab in self.slabs)
        return slabs + self.recent_k.host.nbytes + self.recent_v.host.nbytes

    @property
    def rest(self) -> Slab | None:
        """The second layer of codes of the first tokens; None if the codec has none, or without blocks."""
        return self.slabs[0].rest if self.slabs else None

    @property
    def _capacity(self) -> int:
        return sum(slab.blocks for slab in self.slabs)

    def _shape(self, first: bool) -> SlabShape:
        """The shape of this cache's slabs; `first`: of the one that holds the first block."""
        refined = first and bool(refined_parts(self.group, self.codec))
        return SlabShape(self.group, self.codec, self.slab_blocks(self.group, self.codec), refined)

    def begin(self, keys: Sequence[Hashable]) -> None:
        """Take an empty cache's first slabs: shared ones by their keys; a new one for a key that is not shared yet."""
        self.slabs += [self._pool.take(self._shape(first=i == 0), key) for i, key in enumerate(keys)]

    def share(self, keys: Sequence[Hashable]) -> None:
        """Share the first slabs, whose blocks are full. A key identifies the bytes and the domain of a slab."""
        for i, key in enumerate(keys):
            if self.slabs[i].key is None:
                self.slabs[i] = self._pool.share(self.slabs[i], key)

    def shares(self, block: int) -> bool:
        """Whether a block is in a shared slab: it must not be written."""
        return self._place(block)[0].key is not None

    def block(self, block: int) -> list[HostArray]:
        """The host's views of all parts of a block but its token ids, each contiguous, in file order."""
        return [*self._slot(block), *self._rest_of(block)]

    def _slot(self, block: int) -> list[HostArray]:
        slab, slot = self._place(block)
        return slab.slot(slot)

    def _rest_of(self, block: int) -> list[HostArray]:
        """The host's views of the second layer of codes of a block that has its slot."""
        return self.rest.slot(0) if self.rest and block == 0 else []

    def groups(self, block: int, start: int, stop: int) -> list[HostArray]:
        """The host's views of groups `start` to `stop` of a block's parts (not contiguous)."""
        axes = (self.axes.keys,) * 3 + (self.axes.values,) * 3
        return [group_slice(part, axis, start, stop) for part, axis in zip(self._slot(block), axes, strict=True)]

    def recent(self, tokens: int) -> list[HostArray]:
        """The host's views of the first `tokens` recent keys and values: [layers, heads, tokens, dim] as uint16."""
        return [self.recent_k.host[:, :, :tokens], self.recent_v.host[:, :, :tokens]]

    def used_slots(self) -> list[tuple[Slab, int]]:
        """Each slab and how many of its slots hold blocks, in the order of their columns in decode."""
        left, used = self.held_blocks, []
        for slab in self.slabs:
            if left > 0:
                used.append((slab, min(left, slab.blocks)))
            left -= slab.blocks
        return used

    def columns(self) -> npt.NDArray[np.int64]:
        """The position of the token in each column of a decode step's scores; -1 for an empty column.

        Columns: 256 for each slot in use, 64 for the recent tokens, one for the token being fed.
        """
        if self._columns is None:
            stored = (self._block_of_each_slot()[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)).reshape(-1)
            recent = self.quantized + np.arange(GROUP_TOKENS)
            stored[stored >= self.quantized] = -1
            recent[recent >= self.offset] = -1
            self._columns = np.concatenate([stored, recent, [self.offset]])
        return self._columns

    def visible(self) -> mx.array:
        """Which columns the token being fed may see: bool [columns]."""
        if self._visible is None:
            columns = self.columns()
            self._visible = mx.array((columns >= 0) & (columns >= self.group.first_needed(self.offset)))
        return self._visible

    def past(self, layer: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        """The keys and values [1, heads, tokens, dim] that a pass from `offset` on can see, oldest first."""
        first = self.group.first_needed(self.offset)
        quantized = max(self.quantized, first)
        keys, values = [], []
        if first < quantized:
            for q_keys, q_values in self._runs(first // BLOCK_TOKENS, -(-quantized // BLOCK_TOKENS), layer):
                keys.append(join_slots(q_keys, self.axes.keys, self.codec.bits, dtype))
                values.append(join_slots(q_values, self.axes.values, self.codec.bits, dtype))
            base = first // BLOCK_TOKENS * BLOCK_TOKENS
            seen = slice(first - base, quantized - base)
            keys, values = ([mx.concatenate(x, axis=1)[:, seen]] for x in (keys, values))
            if self.rest:
                every = slice(0, 1)
                keys = self._refined(keys[0], self.rest.keys(every, layer), self.axes.keys)
                values = self._refined(values[0], self.rest.values(every, layer), self.axes.values)
        begin, end = max(first - self.quantized, 0), self.offset - self.quantized
        if begin < end:
            keys.append(self.recent_k.array[layer, :, begin:end].astype(dtype))
            values.append(self.recent_v.array[layer, :, begin:end].astype(dtype))
        return mx.concatenate(keys, axis=1)[None], mx.concatenate(values, axis=1)[None]

    def _runs(self, first: int, end: int, layer: int) -> list[tuple[Quantized, Quantized]]:
        """Blocks `first` to `end` of one layer as few runs of neighbouring slots: [slots, heads, rows, ...] each."""
        runs: list[tuple[Slab, int, int]] = []
        for block in range(first, end):
            slab, slot = self._place(block)
            if runs and runs[-1][0] is slab and runs[-1][2] == slot:
                runs[-1] = (slab, runs[-1][1], slot + 1)
            else:
                runs.append((slab, slot, slot + 1))
        return [(slab.keys(slice(a, b), layer), slab.values(slice(a, b), layer)) for slab, a, b in runs]

    def _refined(self, x: mx.array, rest: Quantized, axis: Axis) -> list[mx.array]:
        """Keys or values from the first token on, [heads, tokens, dim], in two pieces: refined tokens, then others."""
        n = self.codec.refined
        return [x[:, :n] + join_slots(rest, axis, self.codec.bits, x.dtype), x[:, n:]]

    def gather(self) -> "Intake":
        """Stack this pass's keys and values, and quantize the groups that they complete. Nothing is evaluated yet."""
        if len(self.fresh) != len(self.group.layers):
            raise ValueError(f"{len(self.group.layers) - len(self.fresh)} layers of {self.group.id} saw no keys")
        pairs = [self.fresh[i] for i in range(len(self.fresh))]
        k, v = (mx.stack([pair[side][0] for pair in pairs]).astype(mx.bfloat16) for side in (0, 1))
        tokens, recent = k.shape[2], self.offset % GROUP_TOKENS
        if self.offset // BLOCK_TOKENS != (self.offset + tokens - 1) // BLOCK_TOKENS:
            raise ValueError(f"a pass of {tokens} tokens at {self.offset} crosses a block's end")
        whole = (recent + tokens) // GROUP_TOKENS * GROUP_TOKENS
        if not whole:
            return Intake(tokens, recent, (), (), k, v)
        if recent:
            k = mx.concatenate([self.recent_k.array[:, :, :recent], k], axis=2)
            v = mx.concatenate([self.recent_v.array[:, :, :recent], v], axis=2)
        codes, rest = list[mx.array](), list[mx.array]()
        refined = not self.quantized and refined_parts(self.group, self.codec)
        for x, axis in ((k, self.axes.keys), (v, self.axes.values)):
            own = quantize(x[:, :, :whole], axis, self.codec.bits)
            codes += own
            rest += left_over(x, own, axis, self.codec) if refined else ()
        return Intake(tokens, 0, codes, rest, k[:, :, whole:], v[:, :, whole:])

    def take(self, intake: "Intake") -> None:
        """Copy an evaluated intake into the blocks and the recent tokens."""
        self.fresh.clear()
        self._columns = self._visible = None
        if intake.codes:
            start = self.quantized % BLOCK_TOKENS // GROUP_TOKENS
            stop = start + (self.offset % GROUP_TOKENS + intake.tokens) // GROUP_TOKENS
            put(intake.codes, self.groups(self.quantized // BLOCK_TOKENS, start, stop))
        if intake.rest:
            put(intake.rest, self._rest_of(0))
        recent = intake.recent_k.shape[2]
        if recent:
            at = slice(intake.recent_at, intake.recent_at + recent)
            put((intake.recent_k, intake.recent_v), (self.recent_k.host[:, :, at], self.recent_v.host[:, :, at]))
        self.offset += intake.tokens

    def tail(self, block: int, tokens: int) -> list[TailArray]:
        whole, recent = divmod(tokens, GROUP_TOKENS)
        codes = [*self.groups(block, 0, whole), *self._rest_of(block)] if whole else []
        return [*codes, *(self.recent(recent) if recent else [])]

    def load_tail(self, block: int, tokens: int, arrays: Sequence[TailArray]) -> None:
        for target, array in zip(self.tail(block, tokens), arrays, strict=True):
            target[...] = array

    def forget(self) -> None:
        self.fresh.clear()

    def release(self) -> None:
        for slab in self.slabs:
            self._pool.give(slab)
        self.slabs.clear()
        self._pool.count(-self.recent_k.host.nbytes - self.recent_v.host.nbytes)


@dataclass(frozen=True)
class Intake:
    """What a pass adds to one layer group.

    codes: packed, scales and biases of the keys and of the values of the groups that it completes, [layers, heads,
    rows, ...]; rest: the second layer of codes of the first group, alike; recent_k, recent_v: what stays recent,
    bfloat16 [layers, heads, tokens, dim], to be put at `recent_at`.
    """

    tokens: int
    recent_at: int
    codes: Sequence[mx.array]
    rest: Sequence[mx.array]
    recent_k: mx.array
    recent_v: mx.array

    def arrays(self) -> list[mx.array]:
        return [*self.codes, *self.rest, self.recent_k, self.recent_v]
