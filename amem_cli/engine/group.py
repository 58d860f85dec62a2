"""The blocks and recent tokens of one layer group of one agent, and the keys and values of the pass under way."""

from collections.abc import Hashable, Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from amem_cli.engine.codec import Quantized, axes_of, dequantize, quantize
from amem_cli.engine.slab import Buffer, HostArray, Slab, SlabPool, host_view
from kvstore.shapes import BLOCK_TOKENS, GROUP_TOKENS, Axis, Codec, LayerGroup, recent_parts


class GroupCache:
    """One layer group: quantized blocks in slabs, and up to 63 recent tokens in bfloat16."""

    def __init__(self, group: LayerGroup, codec: Codec, pool: SlabPool) -> None:
        self.group = group
        self.codec = codec
        self.axes = axes_of(group, codec)
        self.offset = 0  # tokens taken in
        self.slabs: list[Slab] = []
        self.fresh: dict[int, tuple[mx.array, mx.array]] = {}  # layer's place in the group → this pass's k and v
        self._pool = pool
        self._columns: npt.NDArray[np.int64] | None = None
        self._visible: mx.array | None = None
        # recent.k, recent.v: [layers, heads, 64, dim]
        recent = recent_parts(group, GROUP_TOKENS)
        pool.count(sum(part.nbytes for part in recent))
        self.recent_k, self.recent_v = (Buffer(part) for part in recent)

    @property
    def quantized(self) -> int:
        """Tokens that are in blocks; the others are recent."""
        return self.offset - self.offset % GROUP_TOKENS

    @property
    def held_blocks(self) -> int:
        """Blocks in memory, the open one included."""
        blocks = -(-self.quantized // BLOCK_TOKENS)
        return blocks if self.group.window is None else min(blocks, self._capacity)

    @property
    def nbytes(self) -> int:
        slabs = sum(slab.nbytes for slab in self.slabs)
        return slabs + self.recent_k.host.nbytes + self.recent_v.host.nbytes

    @property
    def _capacity(self) -> int:
        return sum(slab.blocks for slab in self.slabs)

    def _place(self, block: int) -> tuple[Slab, int]:
        """The slab and slot of a block, allocated if need be. A window's slab is a ring."""
        if self.group.window is not None:
            if not self.slabs:
                self.slabs.append(self._pool.take(self.group, self.codec))
            return self.slabs[0], block % self.slabs[0].blocks
        while block >= self._capacity:
            self.slabs.append(self._pool.take(self.group, self.codec))
        per_slab = self.slabs[0].blocks
        return self.slabs[block // per_slab], block % per_slab

    def begin(self, keys: Sequence[Hashable]) -> None:
        """Take an empty cache's first slabs: those that are shared under `keys`, and new ones in place of others."""
        self.slabs += [self._pool.take(self.group, self.codec, key) for key in keys]

    def share(self, keys: Sequence[Hashable]) -> None:
        """Share the first slabs, whose blocks are full, under keys that stand for their bytes and their domain."""
        for i, key in enumerate(keys):
            if self.slabs[i].key is None:
                self.slabs[i] = self._pool.share(self.group, self.codec, self.slabs[i], key)

    def shares(self, block: int) -> bool:
        """Whether a block lies in a slab that is shared: it is there, and must not be written."""
        return self._place(block)[0].key is not None

    def block(self, block: int) -> list[HostArray]:
        """The host's views of a block's quantized parts, each contiguous, in file order."""
        slab, slot = self._place(block)
        return slab.slot(slot)

    def groups(self, block: int, start: int, stop: int) -> list[HostArray]:
        """The host's views of groups `start` to `stop` of a block's parts (not contiguous)."""
        axes = (self.axes.keys,) * 3 + (self.axes.values,) * 3
        return [_group_slice(part, axis, start, stop) for part, axis in zip(self.block(block), axes, strict=True)]

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
        """The position of the token in each column of a decode step's scores; -1 where there is none.

        Columns: 256 for each slot in use, 64 for the recent tokens, one for the token being fed.
        """
        if self._columns is None:
            slots = np.arange(self.held_blocks)
            if self.group.window is not None and slots.size:
                last = (self.quantized - 1) // BLOCK_TOKENS
                slots = last - (last - slots) % self.slabs[0].blocks
            stored = (slots[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)).reshape(-1)
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
                keys.append(self._plain(q_keys, self.axes.keys, dtype))
                values.append(self._plain(q_values, self.axes.values, dtype))
            base = first // BLOCK_TOKENS * BLOCK_TOKENS
            seen = slice(first - base, quantized - base)
            keys, values = ([mx.concatenate(x, axis=1)[:, seen]] for x in (keys, values))
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

    def _plain(self, q: Quantized, axis: Axis, dtype: mx.Dtype) -> mx.array:
        """[slots, heads, rows, ...] codes to [heads, tokens, dim]."""
        x = dequantize(q, axis, self.codec.bits, dtype)
        slots, heads, tokens, dim = x.shape
        return x.swapaxes(0, 1).reshape(heads, slots * tokens, dim)

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
            return Intake(tokens, recent, None, None, k, v)
        if recent:
            k = mx.concatenate([self.recent_k.array[:, :, :recent], k], axis=2)
            v = mx.concatenate([self.recent_v.array[:, :, :recent], v], axis=2)
        q_keys = quantize(k[:, :, :whole], self.axes.keys, self.codec.bits)
        q_values = quantize(v[:, :, :whole], self.axes.values, self.codec.bits)
        return Intake(tokens, 0, q_keys, q_values, k[:, :, whole:], v[:, :, whole:])

    def take(self, intake: "Intake") -> None:
        """Copy an evaluated intake into the blocks and the recent tokens."""
        self.fresh.clear()
        self._columns = self._visible = None
        if intake.keys is not None and intake.values is not None:
            start = self.quantized % BLOCK_TOKENS // GROUP_TOKENS
            stop = start + (self.offset % GROUP_TOKENS + intake.tokens) // GROUP_TOKENS
            targets = self.groups(self.quantized // BLOCK_TOKENS, start, stop)
            for target, codes in zip(targets, (*intake.keys, *intake.values), strict=True):
                target[...] = _host(codes)
        rest = intake.recent_k.shape[2]
        if rest:
            at = slice(intake.recent_at, intake.recent_at + rest)
            self.recent_k.host[:, :, at] = _host(intake.recent_k)
            self.recent_v.host[:, :, at] = _host(intake.recent_v)
        self.offset += intake.tokens

    def tail(self, block: int, tokens: int) -> list[HostArray]:
        """The host's views of what a tail of `tokens` tokens from `block` on holds of this group, in file order."""
        whole, recent = divmod(tokens, GROUP_TOKENS)
        return [*(self.groups(block, 0, whole) if whole else []), *(self.recent(recent) if recent else [])]

    def load_tail(self, block: int, tokens: int, arrays: Sequence[HostArray]) -> None:
        """Put back what `tail` gave."""
        for target, array in zip(self.tail(block, tokens), arrays, strict=True):
            target[...] = array

    def release(self) -> None:
        """Give the slabs back to the pool; the cache must not be used any more."""
        for slab in self.slabs:
            self._pool.give(self.group, self.codec, slab)
        self.slabs.clear()
        self._pool.count(-self.recent_k.host.nbytes - self.recent_v.host.nbytes)


class Intake:
    """What a pass adds to one layer group.

    keys, values: the groups that it completes, [layers, heads, rows, ...]; recent_k, recent_v: what stays recent,
    bfloat16 [layers, heads, tokens, dim], to be put at `recent_at`.
    """

    def __init__(
        self,
        tokens: int,
        recent_at: int,
        keys: Quantized | None,
        values: Quantized | None,
        recent_k: mx.array,
        recent_v: mx.array,
    ) -> None:
        self.tokens = tokens
        self.recent_at = recent_at
        self.keys = keys
        self.values = values
        self.recent_k = recent_k
        self.recent_v = recent_v

    def arrays(self) -> list[mx.array]:
        return [*(self.keys or ()), *(self.values or ()), self.recent_k, self.recent_v]


def _host(array: mx.array) -> HostArray:
    return host_view(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def _group_slice(part: HostArray, axis: Axis, start: int, stop: int) -> HostArray:
    """Groups `start` to `stop` of a block's part: the tokens are its last axis or the one before."""
    if axis == "channel":
        return part[..., start * GROUP_TOKENS : stop * GROUP_TOKENS, :]
    per_group = part.shape[-1] * GROUP_TOKENS // BLOCK_TOKENS
    return part[..., start * per_group : stop * per_group]
