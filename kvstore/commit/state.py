"""A whole state of an agent: the blocks, the tail and the pages that it needs, and the manifest that names them.

`write_state` is the one function that decides which files a state has and what they say of themselves. Where the
bytes of keys and values come from is the caller's `StateContent`: an agent's cache, or made-up bytes in a test.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstore.commit.transaction import Transaction
from kvstore.disk.clock import timestamp
from kvstore.disk.files import Buffer
from kvstore.format.block import BlockHeader, TailHeader
from kvstore.format.codecs import Codec
from kvstore.format.layers import LayerGroup, block_parts, tail_parts
from kvstore.format.manifest import (
    PAGE_TOKENS,
    BlockRow,
    FileRow,
    Manifest,
    ModelIdentity,
    Page,
    Sampling,
    Turn,
    features_of,
)
from kvstore.format.parts import BLOCK_TOKENS
from kvstore.format.prefix_keys import prefix_chain
from kvstore.format.records import Domain

Tokens = npt.NDArray[np.int32]
Rows = dict[tuple[str, int], BlockRow]
"""Blocks on disk, by layer group's id and block number."""


class StateContent(Protocol):
    """The bytes of a state's keys, values and recurrent states, as C-contiguous buffers."""

    def block(self, group: LayerGroup, number: int) -> Sequence[Buffer]:
        """The parts of a full block, in file order, without its token ids."""

    def tail(self) -> Sequence[Buffer]:
        """All parts of the tail, in file order."""


@dataclass(frozen=True)
class NewState:
    """A state to be written: everything that its manifest holds besides files and the time."""

    agent: str  # its id
    previous: str | None
    op: str
    model: ModelIdentity
    codec: Codec
    groups: tuple[LayerGroup, ...]
    tokens: Tokens  # all of them, [n] int32
    cached: int
    feeds: tuple[tuple[int, int], ...] = ()
    turns: tuple[Turn, ...] = ()
    owed: tuple[int, ...] = ()
    stop: str | None = None
    sampling: Sampling | None = None
    complete: bool = True
    recomputed: bool = False

    def needed_blocks(self, *, in_pages: bool) -> Iterator[tuple[LayerGroup, int]]:
        """The full blocks that the state needs: those that pages list, or those that the manifest lists."""
        for group in self.groups:
            if group.layer_kind.is_listed_in_pages is in_pages:
                yield from ((group, number) for number in group.needed_blocks(self.cached))

    def prefix_keys(self, domain: Domain, group: LayerGroup) -> list[str]:
        """The prefix keys of all full blocks of its tokens in one layer group."""
        return list(prefix_chain(domain.salt, self.model.fingerprint, self.codec.name, group.id, self.tokens))

    def block_header(self, domain: Domain, group: LayerGroup, number: int, keys: Sequence[str]) -> BlockHeader:
        """The header of a block. `keys`: the prefix keys of the layer group's blocks."""
        return BlockHeader(
            domain=domain.id,
            model=self.model.fingerprint,
            codec=self.codec.name,
            group=group.id,
            position=number * BLOCK_TOKENS,
            prefix_key=keys[number],
            parent_key=keys[number - 1] if number else "",
        )

    def pages(self, domain: Domain, rows: Rows, start: int = 0) -> Iterator[Page]:
        """The pages from token `start` on, a multiple of 4,096."""
        listed = [group.id for group in self.groups if group.layer_kind.is_listed_in_pages]
        for first in range(start, len(self.tokens), PAGE_TOKENS):
            end = min(first + PAGE_TOKENS, len(self.tokens))
            blocks = range(first // BLOCK_TOKENS, min(end, self.cached) // BLOCK_TOKENS)
            own = tuple(rows[group, number] for number in blocks for group in listed)
            yield Page(first, tuple(self.tokens[first:end].tolist()), own, domain.salt)

    def manifest(self, domain: Domain, rows: Rows, pages: tuple[FileRow, ...], tail: FileRow | None) -> Manifest:
        """The manifest that names these files."""
        return Manifest(
            agent=self.agent,
            domain=domain.id,
            salt=domain.salt,
            previous=self.previous,
            resumes=None,
            op=self.op,
            model=self.model,
            codec=self.codec,
            groups=self.groups,
            tokens=len(self.tokens),
            cached=self.cached,
            pages=pages,
            window_blocks=tuple(rows[group.id, number] for group, number in self.needed_blocks(in_pages=False)),
            tail=tail,
            feeds=self.feeds,
            turns=self.turns,
            owed=self.owed,
            stop=self.stop,
            sampling=self.sampling,
            complete=self.complete,
            created=timestamp(),
            recomputed=self.recomputed,
            features=features_of(self.codec),
        )


def write_state(
    txn: Transaction,
    state: NewState,
    content: StateContent,
    known: Mapping[tuple[str, int], BlockRow] | None = None,
    closed_pages: tuple[FileRow, ...] = (),
) -> tuple[Manifest, Rows]:
    """Write the files of a state but its manifest, which the caller commits. Returns it, and the rows of its blocks.

    `known`: blocks on disk, which are not written again; `closed_pages`: the first pages, on disk, too. Raises what
    `Transaction.put_block` raises.
    """
    rows = _write_blocks(txn, state, content, known or {})
    tail = _write_tail(txn, state, content)
    start = len(closed_pages) * PAGE_TOKENS
    pages = (*closed_pages, *(txn.put_page(page) for page in state.pages(txn.domain, rows, start)))
    return state.manifest(txn.domain, rows, pages, tail), rows


def _write_blocks(
    txn: Transaction, state: NewState, content: StateContent, known: Mapping[tuple[str, int], BlockRow]
) -> Rows:
    rows: Rows = {}
    for group in state.groups:
        needed = group.needed_blocks(state.cached)
        rows |= {(group.id, number): known[group.id, number] for number in needed if (group.id, number) in known}
        missing = [number for number in needed if (group.id, number) not in known]
        keys = state.prefix_keys(txn.domain, group) if missing else []
        for number in missing:
            header = state.block_header(txn.domain, group, number, keys)
            ids = np.ascontiguousarray(state.tokens[header.position : header.position + BLOCK_TOKENS], np.int32)
            parts = block_parts(group, state.codec, header.position)
            rows[group.id, number] = txn.put_block(header, [ids.data, *content.block(group, number)], parts)
    return rows


def _write_tail(txn: Transaction, state: NewState, content: StateContent) -> FileRow | None:
    """Write what follows the last full block, and the states of recurrent layers; None if there is neither."""
    parts = tail_parts(state.groups, state.codec, state.cached)
    if not state.cached or not parts:
        return None
    tokens = state.cached % BLOCK_TOKENS
    header = TailHeader(
        domain=txn.domain.id,
        salt=txn.domain.salt,
        codec=state.codec.name,
        model=state.model.fingerprint,
        position=state.cached - tokens,
        tokens=tokens,
    )
    return txn.put_tail(header, content.tail(), parts)
