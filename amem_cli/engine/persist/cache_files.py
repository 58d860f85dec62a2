"""Blocks and tails between the store and an agent's cache, without a copy in either direction.

Files are read by a few threads: `preadv` and the checksum release the GIL, and no MLX call is made there. Slabs that
another agent of the domain has in memory are shared instead of read. Only a slab that was read whole is shared.
"""

import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from amem_cli.engine.cache.agent_cache import AgentCache
from amem_cli.engine.cache.block_cache import BlockCache
from amem_cli.engine.cache.slabs import HostArray
from kvstore.commit.state import Rows, Tokens
from kvstore.disk.files import Buffer
from kvstore.errors import DamageError
from kvstore.format.layers import LayerGroup, block_parts, cut_position, tail_parts
from kvstore.format.manifest import PAGE_TOKENS, BlockRow, FileRow, Manifest
from kvstore.format.parts import BLOCK_TOKENS
from kvstore.store import Store

_NUMPY = {"U32": np.uint32, "I32": np.int32, "BF16": np.uint16, "F16": np.float16, "F32": np.float32}
READERS = min(4, os.cpu_count() or 1)


def rows_of(rows: Iterable[BlockRow]) -> Rows:
    """Rows by layer group and block number."""
    return {(row.group, row.position // BLOCK_TOKENS): row for row in rows}


@dataclass(frozen=True)
class CacheContent:
    """The content of an agent's cache, to be written as a state at the cache's position."""

    cache: AgentCache

    def block(self, group: LayerGroup, number: int) -> list[Buffer]:
        [cache] = [cache for cache in self.cache.with_blocks if cache.group == group]
        return [array.data for array in cache.block(number)]

    def tail(self) -> list[Buffer]:
        block, tokens = divmod(self.cache.offset, BLOCK_TOKENS)
        views = [view for cache in self.cache.caches for view in cache.tail(block, tokens)]
        return [np.ascontiguousarray(view).data for view in views]


@dataclass(frozen=True)
class Loading:
    """Files to be read into a cache. `read` is thread-safe (no MLX). Call `finish` afterwards on the MLX thread."""

    read: Callable[[], None]
    finish: Callable[[], Rows]

    def now(self) -> Rows:
        """Both, one after the other."""
        self.read()
        return self.finish()


def load(store: Store, manifest: Manifest, cache: AgentCache, tokens: Tokens, position: int | None = None) -> Loading:
    """Load a state into an empty cache, up to `position`; by default all of it.

    An earlier position must be one that caches of all layer groups can be cut back to. `finish` returns the rows of
    the full blocks. `read` raises DamageError and IsolationError; the cache must not be used afterwards.
    """
    at = manifest.cached if position is None else position
    wanted = {key: row for key, row in rows_of(store.blocks(manifest)).items() if row.position < at}
    blocks = load_blocks(store, manifest.domain, wanted, cache, tokens, at)
    needs_tail = _needs_tail(cache, wanted, at)
    read_tail, put_tail = _load_tail(store, manifest, cache, at) if needs_tail else (_nothing, _nothing)

    def read() -> None:
        blocks.read()
        read_tail()

    def finish() -> Rows:
        put_tail()
        return blocks.finish()

    return Loading(read, finish)


def load_blocks(store: Store, domain: str, rows: Rows, cache: AgentCache, tokens: Tokens, position: int) -> Loading:
    """Load blocks into an empty cache, several at a time, and set it to `position`. As `load`, without a tail."""
    caches = {part.group.id: part for part in cache.with_blocks}
    # slots are found, and slabs allocated, on the MLX thread
    for part in cache.with_blocks:
        part.begin(slab_keys(part, domain, rows, tokens, position))
    jobs = [
        (row, caches[group_id], caches[group_id].block(block))
        for (group_id, block), row in rows.items()
        if not caches[group_id].shares(block)
    ]

    def read(job: tuple[BlockRow, BlockCache, Sequence[HostArray]]) -> None:
        row, part, slot = job
        ids = np.empty(BLOCK_TOKENS, np.int32)
        buffers = [array.data for array in (ids, *slot)]
        store.read_block(domain, row, block_parts(part.group, part.codec, row.position), buffers)
        needed = slice(row.position, min(row.position + BLOCK_TOKENS, position))  # what follows may be another text's
        if not np.array_equal(ids[: needed.stop - needed.start], tokens[needed]):
            raise DamageError(
                f"block sha256:{row.sha256} holds other tokens than its agent",
                "`amem verify` lists the affected agents",
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
    """Share the cache's full slabs with other agents of the domain. `rows`: of its full blocks."""
    for part in cache.with_blocks:
        part.share(slab_keys(part, domain, rows, tokens, cache.offset))


def slab_keys(part: BlockCache, domain: str, rows: Rows, tokens: Tokens, position: int) -> list[Hashable]:
    """The keys under which the full slabs of an agent at `position` are shared.

    Blocks of one domain with the same SHA-256 are equal to the last bit, headers included, and headers name model,
    codec and layer group. Token ids are part of the key because an agent checks those of each block that it reads.
    """
    keys: list[Hashable] = []
    for blocks in part.shareable(position):
        digests = tuple(rows[part.group.id, block].sha256 for block in blocks)
        keys.append((domain, digests, tokens[blocks.start * BLOCK_TOKENS : blocks.stop * BLOCK_TOKENS].tobytes()))
    return keys


def _nothing() -> None:
    """No tail."""


def _needs_tail(cache: AgentCache, blocks: Rows, position: int) -> bool:
    """Whether the tail holds a part of the state: recurrent states, or the tokens of a block that is not stored."""
    if cache.recurrent:
        return True
    open_block = cache.with_blocks[0].group.id, position // BLOCK_TOKENS
    return position % BLOCK_TOKENS > 0 and open_block not in blocks


def _load_tail(
    store: Store, manifest: Manifest, cache: AgentCache, position: int
) -> tuple[Callable[[], None], Callable[[], None]]:
    """The two steps of `Loading` for what an agent at `position` has beyond its full blocks."""
    stored = manifest.cached % BLOCK_TOKENS
    if position not in (manifest.cached, cut_position(manifest.groups, position)):
        raise ValueError(f"a tail cannot be cut at {position}")
    parts = tail_parts(manifest.groups, manifest.codec, manifest.cached)
    arrays = [np.empty(part.shape, _NUMPY[part.dtype]) for part in parts]

    def read() -> None:
        store.read_tail(manifest, parts, [array.data for array in arrays])

    def put() -> None:
        block, left = position // BLOCK_TOKENS, iter(arrays)
        for part, group in zip(cache.caches, manifest.groups, strict=True):
            own = tail_parts((group,), manifest.codec, manifest.cached)
            part.load_tail(block, stored, [next(left) for _ in own])

    return read, put


def closed_pages(manifest: Manifest, position: int) -> tuple[FileRow, ...]:
    """The pages that a state continuing from `position` shares with `manifest`."""
    return manifest.pages[: min(position, manifest.cached) // PAGE_TOKENS]
