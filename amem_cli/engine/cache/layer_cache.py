"""The blocks and recent tokens of one layer group of one agent, and the keys and values of the pass under way.

Where the codec refines the first tokens, `rest` holds codes of what the block's own codes left over of them: keys,
scores and outputs are sums over both.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from amem_cli.engine.cache.codec import Quantized, axes_of, dequantize, quantize
from amem_cli.engine.cache.slabs import Buffer, HostArray, Slab, SlabPool, host_view
from kvstore.format.codecs import Axis, Codec
from kvstore.format.layers import LayerGroup, recent_parts, refined_parts
from kvstore.format.parts import BLOCK_TOKENS, GROUP_TOKENS


class LayerGroupCache:
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
    def rest(self) -> Slab | None:
        """What refines the first tokens; None where the codec refines none, and where there are no blocks yet."""
        return self.slabs[0].rest if self.slabs else None

    @property
    def _capacity(self) -> int:
        return sum(slab.blocks for slab in self.slabs)

    def _place(self, block: int) -> tuple[Slab, int]:
        """The slab and slot of a block, allocated if need be. A window's slab is a ring."""
        if self.group.window is not None:
            if not self.slabs:
                self.slabs.append(self._pool.take(self.group, self.codec, first=True))
            return self.slabs[0], block % self.slabs[0].blocks
        while block >= self._capacity:
            self.slabs.append(self._pool.take(self.group, self.codec, first=not self.slabs))
        per_slab = self.slabs[0].blocks
        return self.slabs[block // per_slab], block % per_slab

    def begin(self, keys: Sequence[Hashable]) -> None:
        """Take an empty cache's first slabs: those that are shared under `keys`, and new ones in place of others."""
        self.slabs += [self._pool.take(self.group, self.codec, i == 0, key) for i, key in enumerate(keys)]

    def share(self, keys: Sequence[Hashable]) -> None:
        """Share the first slabs, whose blocks are full, under keys that stand for their bytes and their domain."""
        for i, key in enumerate(keys):
            if self.slabs[i].key is None:
                self.slabs[i] = self._pool.share(self.group, self.codec, self.slabs[i], key)

    def shares(self, block: int) -> bool:
        """Whether a block lies in a slab that is shared: it is there, and must not be written."""
        return self._place(block)[0].key is not None

    def block(self, block: int) -> list[HostArray]:
        """The host's views of all parts of a block but its token ids, each contiguous, in file order."""
        return [*self._slot(block), *self._rest_of(block)]

    def _slot(self, block: int) -> list[HostArray]:
        slab, slot = self._place(block)
        return slab.slot(slot)

    def _rest_of(self, block: int) -> list[HostArray]:
        """The host's views of what refines a block that has its slot."""
        return self.rest.slot(0) if self.rest and block == 0 else []

    def groups(self, block: int, start: int, stop: int) -> list[HostArray]:
        """The host's views of groups `start` to `stop` of a block's parts (not contiguous)."""
        axes = (self.axes.keys,) * 3 + (self.axes.values,) * 3
        return [_group_slice(part, axis, start, stop) for part, axis in zip(self._slot(block), axes, strict=True)]

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

    def _plain(self, q: Quantized, axis: Axis, dtype: mx.Dtype) -> mx.array:
        """[slots, heads, rows, ...] codes to [heads, tokens, dim]."""
        x = dequantize(q, axis, self.codec.bits, dtype)
        slots, heads, tokens, dim = x.shape
        return x.swapaxes(0, 1).reshape(heads, slots * tokens, dim)

    def _refined(self, x: mx.array, rest: Quantized, axis: Axis) -> list[mx.array]:
        """Keys or values from the first token on, [heads, tokens, dim], in two pieces: the refined, and the others."""
        refined = self.codec.refined
        return [x[:, :refined] + self._plain(rest, axis, x.dtype), x[:, refined:]]

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
        codes: list[mx.array] = []
        rest: list[mx.array] = []
        refined = not self.quantized and refined_parts(self.group, self.codec)
        for x, axis in ((k, self.axes.keys), (v, self.axes.values)):
            own = quantize(x[:, :, :whole], axis, self.codec.bits)
            codes += own
            rest += self._left_over(x, own, axis) if refined else ()
        return Intake(tokens, 0, codes, rest, k[:, :, whole:], v[:, :, whole:])

    def _left_over(self, x: mx.array, codes: Quantized, axis: Axis) -> Quantized:
        """Codes of what `codes` leave of the first tokens of x, [layers, heads, tokens, dim]."""
        first = slice(0, self.codec.refined)
        held = dequantize(codes, axis, self.codec.bits, mx.float32)
        left = x[:, :, first].astype(mx.float32) - held[:, :, first]
        return quantize(left.astype(mx.bfloat16), axis, self.codec.bits)

    def take(self, intake: "Intake") -> None:
        """Copy an evaluated intake into the blocks and the recent tokens."""
        self.fresh.clear()
        self._columns = self._visible = None
        if intake.codes:
            start = self.quantized % BLOCK_TOKENS // GROUP_TOKENS
            stop = start + (self.offset % GROUP_TOKENS + intake.tokens) // GROUP_TOKENS
            _put(intake.codes, self.groups(self.quantized // BLOCK_TOKENS, start, stop))
        if intake.rest:
            _put(intake.rest, self._rest_of(0))
        recent = intake.recent_k.shape[2]
        if recent:
            at = slice(intake.recent_at, intake.recent_at + recent)
            self.recent_k.host[:, :, at] = _host(intake.recent_k)
            self.recent_v.host[:, :, at] = _host(intake.recent_v)
        self.offset += intake.tokens

    def tail(self, block: int, tokens: int) -> list[HostArray]:
        """The host's views of what a tail of `tokens` tokens from `block` on holds of this group, in file order."""
        whole, recent = divmod(tokens, GROUP_TOKENS)
        codes = [*self.groups(block, 0, whole), *self._rest_of(block)] if whole else []
        return [*codes, *(self.recent(recent) if recent else [])]

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


@dataclass(frozen=True)
class Intake:
    """What a pass adds to one layer group.

    codes: packed, scales and biases of the keys and of the values of the groups that it completes, [layers, heads,
    rows, ...]; rest: the same of what refines the first group; recent_k, recent_v: what stays recent, bfloat16
    [layers, heads, tokens, dim], to be put at `recent_at`.
    """

    tokens: int
    recent_at: int
    codes: Sequence[mx.array]
    rest: Sequence[mx.array]
    recent_k: mx.array
    recent_v: mx.array

    def arrays(self) -> list[mx.array]:
        return [*self.codes, *self.rest, self.recent_k, self.recent_v]


def _put(arrays: Sequence[mx.array], targets: Sequence[HostArray]) -> None:
    for target, array in zip(targets, arrays, strict=True):
        target[...] = _host(array)


def _host(array: mx.array) -> HostArray:
    return host_view(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def _group_slice(part: HostArray, axis: Axis, start: int, stop: int) -> HostArray:
    """Groups `start` to `stop` of a block's part: the tokens are its last axis or the one before."""
    if axis == "channel":
        return part[..., start * GROUP_TOKENS : stop * GROUP_TOKENS, :]
    per_group = part.shape[-1] * GROUP_TOKENS // BLOCK_TOKENS
    return part[..., start * per_group : stop * per_group]
