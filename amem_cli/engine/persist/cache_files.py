"""Between an agent's cache and the store: blocks and tails are read straight into the cache's memory, and written
straight out of it.

Reading runs on a few threads: `preadv` and the checksum release the GIL, and no MLX call is made there. Slabs that
another agent of the domain has in memory are shared instead; only what was read without an error is shared.
"""

import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from amem_cli.engine.cache.agent_cache import AgentCache
from amem_cli.engine.cache.layer_cache import LayerGroupCache
from amem_cli.engine.cache.recurrent import RecurrentCache
from amem_cli.engine.cache.slabs import HostArray, slab_blocks
from kvstore.commit.transaction import Transaction
from kvstore.errors import DamageError
from kvstore.format.block import BlockHeader, TailHeader
from kvstore.format.codecs import Codec
from kvstore.format.layers import LayerGroup, block_parts, tail_parts
from kvstore.format.manifest import PAGE_TOKENS, BlockRow, FileRow, Manifest, ModelIdentity, Page
from kvstore.format.parts import BLOCK_TOKENS, GROUP_TOKENS
from kvstore.format.prefix_keys import prefix_chain
from kvstore.format.records import Domain
from kvstore.store import Store

Tokens = npt.NDArray[np.int32]
Rows = dict[tuple[str, int], BlockRow]  # (layer group's id, block's number) → what is on disk

_NUMPY = {"U32": np.uint32, "I32": np.int32, "BF16": np.uint16, "F16": np.float16, "F32": np.float32}
READERS = min(4, os.cpu_count() or 1)


def rows_of(rows: Iterable[BlockRow]) -> Rows:
    """Rows by layer group and block number."""
    return {(row.group, row.position // BLOCK_TOKENS): row for row in rows}


def needed_blocks(group: LayerGroup, position: int) -> range:
    """The full blocks that an agent at `position` needs of a layer group."""
    return range(group.first_needed(position) // BLOCK_TOKENS, position // BLOCK_TOKENS)


def prefix_keys(domain: Domain, model: ModelIdentity, codec: Codec, group: LayerGroup, tokens: Tokens) -> list[str]:
    """The prefix keys of all full blocks of `tokens` in one layer group."""
    return list(prefix_chain(domain.salt, model.fingerprint, codec.name, group.id, tokens))


@dataclass(frozen=True)
class Loading:
    """Files to be read into a cache. `read` makes no MLX call; `finish`, behind it, does."""

    read: Callable[[], None]
    finish: Callable[[], Rows]

    def now(self) -> Rows:
        """Both at once."""
        self.read()
        return self.finish()


def load(store: Store, manifest: Manifest, cache: AgentCache, tokens: Tokens, position: int | None = None) -> Loading:
    """How to bring an empty cache to `position`, by default to where the manifest stands.

    A position before that must be a multiple of 64, and only full-attention layers can be brought there. `finish`
    returns the rows of its full blocks. `read` raises DamageError and IsolationError; the cache is to be thrown away
    then.
    """
    at = manifest.cached if position is None else position
    wanted = {key: row for key, row in rows_of(store.blocks(manifest)).items() if row.position < at}
    blocks = load_blocks(store, manifest.domain, wanted, cache, tokens, at)
    has_tail = cache.states or (at % BLOCK_TOKENS and (cache.groups[0].group.id, at // BLOCK_TOKENS) not in wanted)
    read_tail, put_tail = _load_tail(store, manifest, cache, at) if has_tail else (_nothing, _nothing)

    def read() -> None:
        blocks.read()
        read_tail()

    def finish() -> Rows:
        put_tail()
        return blocks.finish()

    return Loading(read, finish)


def load_blocks(store: Store, domain: str, rows: Rows, cache: AgentCache, tokens: Tokens, position: int) -> Loading:
    """How to bring the blocks of an empty cache to their slots, several at a time, and the cache to `position`.

    As `load`, without a tail.
    """
    groups = {group.group.id: group for group in cache.groups}
    # slots are found, and slabs made, on the thread that owns MLX
    for group in cache.groups:
        group.begin(slab_keys(group, domain, rows, tokens, position))
    jobs = [
        (row, groups[group_id], groups[group_id].block(block))
        for (group_id, block), row in rows.items()
        if not groups[group_id].shares(block)
    ]

    def read(job: tuple[BlockRow, LayerGroupCache, Sequence[HostArray]]) -> None:
        row, group, slot = job
        ids = np.empty(BLOCK_TOKENS, np.int32)
        buffers = [array.data for array in (ids, *slot)]
        store.read_block(domain, row, block_parts(group.group, group.codec, row.position), buffers)
        needed = slice(row.position, min(row.position + BLOCK_TOKENS, position))  # what follows may be another text's
        if not np.array_equal(ids[: needed.stop - needed.start], tokens[needed]):
            raise DamageError(
                f"block sha256:{row.sha256} holds other tokens than its agent", "run `amem verify` to see whom it hurts"
            )

    def read_all() -> None:
        with ThreadPoolExecutor(READERS) as pool:
            for _ in pool.map(read, jobs):
                pass

    def finish() -> Rows:
        cache.offset = position
        share(domain, rows, cache, tokens)
        return {key: row for key, row in rows.items() if row.position + BLOCK_TOKENS <= position}

    return Loading(read_all, finish)


def share(domain: str, rows: Rows, cache: AgentCache, tokens: Tokens) -> None:
    """Let other agents of the domain use the cache's full slabs, or let it use theirs. `rows`: its full blocks'."""
    for group in cache.groups:
        group.share(slab_keys(group, domain, rows, tokens, cache.offset))


def slab_keys(group: LayerGroupCache, domain: str, rows: Rows, tokens: Tokens, position: int) -> list[Hashable]:
    """What the full slabs of an agent at `position` are shared under, where the layer group keeps all its blocks.

    Blocks of one domain with the same SHA-256 are the same to the last bit, their headers included, which name model,
    codec and layer group. The token ids stand beside them: they are what an agent checks of a block that it reads.
    """
    if group.group.window is not None:  # a ring is written to for ever
        return []
    per_slab = slab_blocks(group.group, group.codec)
    keys: list[Hashable] = []
    for first in range(0, position // BLOCK_TOKENS - per_slab + 1, per_slab):
        end = first + per_slab
        digests = tuple(rows[group.group.id, block].sha256 for block in range(first, end))
        keys.append((domain, digests, tokens[first * BLOCK_TOKENS : end * BLOCK_TOKENS].tobytes()))
    return keys


def _nothing() -> None:
    """There is no tail."""


def _load_tail(
    store: Store, manifest: Manifest, cache: AgentCache, position: int
) -> tuple[Callable[[], None], Callable[[], None]]:
    """What reads from the tail what an agent at `position` has beyond its full blocks, and what puts it in place."""
    stored = manifest.cached % BLOCK_TOKENS
    if position != manifest.cached and position % GROUP_TOKENS:
        raise ValueError(f"a tail cannot be cut at {position}")
    parts = tail_parts(manifest.groups, manifest.codec, manifest.cached)
    arrays = [np.empty(part.shape, _NUMPY[part.dtype]) for part in parts]

    def read() -> None:
        store.read_tail(manifest, parts, [array.data for array in arrays])

    def put() -> None:
        block, left = position // BLOCK_TOKENS, iter(arrays)
        for part in cache.parts:
            if isinstance(part, RecurrentCache):
                part.load_tail([next(left) for _ in part.group.states])
            else:
                part.load_tail(block, stored, [next(left) for _ in part.tail(block, stored)])

    return read, put


def save_blocks(
    txn: Transaction, domain: Domain, model: ModelIdentity, cache: AgentCache, tokens: Tokens, known: Rows
) -> Rows:
    """Write the full blocks that an agent needs at its position and that are not on disk; return the rows of all."""
    rows: Rows = {}
    for group in cache.groups:
        needed = needed_blocks(group.group, cache.offset)
        missing = [block for block in needed if (group.group.id, block) not in known]
        rows |= {(group.group.id, b): known[group.group.id, b] for b in needed if (group.group.id, b) in known}
        keys = prefix_keys(domain, model, cache.codec, group.group, tokens) if missing else []
        for block in missing:
            header = BlockHeader(
                domain=domain.id,
                model=model.fingerprint,
                codec=cache.codec.name,
                group=group.group.id,
                position=block * BLOCK_TOKENS,
                prefix_key=keys[block],
                parent_key=keys[block - 1] if block else "",
            )
            ids = tokens[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS]
            buffers = [array.data for array in (np.ascontiguousarray(ids), *group.block(block))]
            parts = block_parts(group.group, group.codec, header.position)
            rows[group.group.id, block] = txn.put_block(header, buffers, parts)
    return rows


def save_tail(txn: Transaction, domain: Domain, model: ModelIdentity, cache: AgentCache) -> FileRow | None:
    """Write what follows the last full block, and the states of recurrent layers; None where there is neither."""
    block, tokens = divmod(cache.offset, BLOCK_TOKENS)
    parts = tail_parts(tuple(part.group for part in cache.parts), cache.codec, cache.offset)
    if not cache.offset or not parts:
        return None
    views = [
        array
        for part in cache.parts
        for array in (part.tail() if isinstance(part, RecurrentCache) else part.tail(block, tokens))
    ]
    header = TailHeader(
        domain=domain.id,
        salt=domain.salt,
        codec=cache.codec.name,
        model=model.fingerprint,
        position=block * BLOCK_TOKENS,
        tokens=tokens,
    )
    return txn.put_tail(header, [np.ascontiguousarray(view).data for view in views], parts)


def closed_pages(manifest: Manifest, position: int) -> tuple[FileRow, ...]:
    """The pages that a state which goes on from `position` shares with `manifest`."""
    return manifest.pages[: min(position, manifest.cached) // PAGE_TOKENS]


def save_pages(
    txn: Transaction, domain: Domain, cache: AgentCache, tokens: Tokens, rows: Rows, closed: tuple[FileRow, ...]
) -> tuple[FileRow, ...]:
    """Write the pages behind the closed ones, which are on disk; return them all."""
    full = [group.group.id for group in cache.groups if group.group.kind == "full"]
    pages = list(closed)
    for start in range(len(closed) * PAGE_TOKENS, len(tokens), PAGE_TOKENS):
        end = min(start + PAGE_TOKENS, len(tokens))
        blocks = range(start // BLOCK_TOKENS, min(end, cache.offset) // BLOCK_TOKENS)
        listed = tuple(rows[group, block] for block in blocks for group in full)
        pages.append(txn.put_page(Page(start, tuple(map(int, tokens[start:end])), listed, domain.salt)))
    return tuple(pages)


def window_rows(cache: AgentCache, rows: Rows) -> tuple[BlockRow, ...]:
    """The rows of the window blocks that an agent needs at its position."""
    return tuple(
        rows[group.group.id, block]
        for group in cache.groups
        if group.group.kind == "window"
        for block in needed_blocks(group.group, cache.offset)
    )
