"""Unpack an archive: check its files and store them in a domain.

What a block or a tail must begin with follows from the manifests and pages that name it: domain, model, codec, layer
group, position, prefix keys and parts are compared as the bytes of a header that is made here, and the token ids in a
block with those in its page.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.archive.tar import Archive
from kvstore.commit.transaction import Transaction
from kvstore.disk.files import Buffer
from kvstore.errors import DamageError
from kvstore.format.block import BlockHeader, FileDigest, TailHeader, digest, encode_header
from kvstore.format.codecs import CODECS
from kvstore.format.document import replace
from kvstore.format.kinds import BLOCK, MANIFEST, PAGE, TAIL, StoredObject
from kvstore.format.layers import block_parts, tail_parts
from kvstore.format.manifest import PAGE_TOKENS, BlockRow, FileRow, Manifest, Page, decode_manifest, decode_page, encode
from kvstore.format.parts import BLOCK_TOKENS, Part
from kvstore.format.prefix_keys import prefix_chain
from kvstore.format.records import Domain

Tokens = npt.NDArray[np.int32]

_FINGERPRINT = re.compile("[0-9a-f]{16,128}")
_HINT = "take a whole, unchanged file that `amem export` wrote"


@dataclass(frozen=True)
class _Expected:
    """A block or a tail that a state names."""

    header: BlockHeader | TailHeader
    parts: tuple[Part, ...]
    row: BlockRow | FileRow
    tokens: bytes  # that a block begins with; a tail has none
    here: BlockHeader | TailHeader  # the header that it gets in the domain it arrives in


class Unpacking:
    """Stores one archive in a transaction. `manifests`: the stored states by their digests in this store."""

    def __init__(self, archive: Archive, txn: Transaction, agent_id: str) -> None:
        self.manifests: dict[str, Manifest] = {}
        self.blocks = 0
        self._archive = archive
        self._txn = txn
        self._agent_id = agent_id
        self._pages: dict[str, Page] = {}
        self._page_digests: dict[str, FileDigest] = {}
        self._expected: dict[StoredObject, _Expected] = {}
        self._rows: dict[str, BlockRow] = {}  # a block's digest in the archive → its row here
        self._tails: dict[str, FileRow] = {}

    def store(self) -> dict[str, str]:
        """Check and stage everything. Returns each state's digest in the archive → its digest in this store.

        Raises DamageError; nothing is committed then.
        """
        archive = self._archive
        with _malformed():
            states = {found.sha256: self._manifest(found, data) for found, data in archive.members(MANIFEST)}
            for found, data in archive.members(PAGE):
                self._pages[found.sha256] = _page(found, data)
                self._page_digests[found.sha256] = digest([data])
            used: set[str] = set()
            for manifest in states.values():
                self._expect(manifest)
                used |= {page.sha256 for page in manifest.pages}
            self._check_listing(states, used)
        for found, data in archive.members(TAIL, BLOCK):
            self._put(found, data)
        archive.finish()
        pages = {sha256: self._put_page(page) for sha256, page in self._pages.items()}
        return self._put_states(states, pages)

    def _manifest(self, found: StoredObject, data: bytes) -> Manifest:
        manifest = decode_manifest(data, str(found))
        contents = self._archive.contents
        at_home = (manifest.domain, manifest.salt) == (contents.domain.id, contents.domain.salt)
        if not at_home or encode(manifest) != data or CODECS.get(manifest.codec.name) != manifest.codec:
            raise _damage(found)
        if not _FINGERPRINT.fullmatch(manifest.model.fingerprint) or not _is_sound(manifest):
            raise _damage(found)
        return manifest

    def _expect(self, manifest: Manifest) -> None:
        """Note what a state needs. Raises DamageError where its parts contradict each other."""
        tokens = self._tokens(manifest)
        rows = [*(row for page in manifest.pages for row in self._pages[page.sha256].blocks), *manifest.window_blocks]
        groups = {group.id: group for group in manifest.groups}
        needed = [(g.id, n * BLOCK_TOKENS) for g in manifest.groups for n in g.needed_blocks(manifest.cached)]
        if sorted((row.group, row.position) for row in rows) != sorted(needed) or len(groups) != len(manifest.groups):
            raise DamageError("a state in the archive lacks blocks, or has too many", _HINT)
        there, here = (self._keys(domain, manifest, tokens) for domain in (self._archive.contents.domain, self._home))
        for row in rows:
            header, new = (_block_header(keys, manifest, row) for keys in (there, here))
            if header.prefix_key != row.prefix_key:
                raise DamageError(f"block sha256:{row.sha256} has another prefix key than its tokens", _HINT)
            own = tokens[row.position : row.position + BLOCK_TOKENS].astype("<i4").tobytes()
            parts = tuple(block_parts(groups[row.group], manifest.codec, row.position))
            self._note(StoredObject(BLOCK, row.sha256), _Expected(header, parts, row, own, new))
        left = manifest.cached % BLOCK_TOKENS
        if (manifest.tail.tokens if manifest.tail else 0) != left:
            raise DamageError("a state in the archive has another tail than it should", _HINT)
        if manifest.tail:
            parts = tuple(tail_parts(manifest.groups, manifest.codec, manifest.cached))
            old, new_one = (_tail_header(d, manifest, left) for d in (self._archive.contents.domain, self._home))
            self._note(StoredObject(TAIL, manifest.tail.sha256), _Expected(old, parts, manifest.tail, b"", new_one))

    @property
    def _home(self) -> Domain:
        return self._txn.domain

    def _tokens(self, manifest: Manifest) -> Tokens:
        """The token ids of a state, its pages checked."""
        ids: list[int] = []
        for row in manifest.pages:
            page = self._pages[row.sha256]
            size = len(page.tokens)
            if (page.start, page.salt, size) != (len(ids), manifest.salt, row.tokens) or len(ids) % PAGE_TOKENS:
                raise DamageError("the pages of a state in the archive do not follow each other", _HINT)
            if self._page_digests[row.sha256] != FileDigest(row.sha256, row.xxh3, row.bytes) or size > PAGE_TOKENS:
                raise DamageError(f"page sha256:{row.sha256} is another one than its row says", _HINT)
            ids += page.tokens
        if len(ids) != manifest.tokens:
            raise DamageError("the pages of a state in the archive hold other tokens than it says", _HINT)
        return np.array(ids, np.int32)

    def _keys(self, domain: Domain, manifest: Manifest, tokens: Tokens) -> tuple[Domain, dict[str, list[str]]]:
        """The prefix keys of a state's layer groups in a domain."""
        model, codec, cached = manifest.model.fingerprint, manifest.codec.name, tokens[: manifest.cached]
        chains = {g.id: list(prefix_chain(domain.salt, model, codec, g.id, cached)) for g in manifest.groups}
        return domain, chains

    def _note(self, found: StoredObject, expected: _Expected) -> None:
        if self._expected.setdefault(found, expected) != expected:
            raise DamageError(f"{found} has two meanings in the archive", _HINT)

    def _check_listing(self, states: dict[str, Manifest], used: set[str]) -> None:
        """The listing is what the states need, to the byte. `_put` can then rely on it."""
        contents = self._archive.contents
        listed = {found: size for found, size in contents.files if not found.kind.is_document}
        wanted = {contents.head, *(snapshot.manifest for snapshot in contents.snapshots)}
        if {found: e.row.bytes for found, e in self._expected.items()} != listed or used != self._pages.keys():
            raise DamageError("the archive holds other files than its states need", _HINT)
        if not wanted <= states.keys():
            raise DamageError("the archive lacks a state that it names", _HINT)

    def _put(self, found: StoredObject, data: bytes) -> None:
        expected = self._expected[found]
        head = encode_header(expected.header.metadata(), expected.parts)
        size = len(head) + sum(part.nbytes for part in expected.parts)
        right = FileDigest(found.sha256, expected.row.xxh3, size)
        if digest([data]) != right or not data.startswith(head + expected.tokens):
            raise _damage(found)
        buffers = _split(data, len(head), expected.parts)
        if isinstance(expected.here, BlockHeader):
            self._rows[found.sha256] = self._txn.put_block(expected.here, buffers, expected.parts)
            self.blocks += 1
        else:
            self._tails[found.sha256] = self._txn.put_tail(expected.here, buffers, expected.parts)

    def _put_page(self, page: Page) -> FileRow:
        blocks = tuple(self._rows[row.sha256] for row in page.blocks)
        return self._txn.put_page(replace(page, blocks=blocks, salt=self._home.salt))

    def _put_states(self, states: dict[str, Manifest], pages: dict[str, FileRow]) -> dict[str, str]:
        stored: dict[str, str] = {}
        for old, manifest in states.items():
            moved = replace(
                manifest,
                agent=self._agent_id,
                domain=self._home.id,
                salt=self._home.salt,
                pages=tuple(pages[row.sha256] for row in manifest.pages),
                window_blocks=tuple(self._rows[row.sha256] for row in manifest.window_blocks),
                tail=self._tails[manifest.tail.sha256] if manifest.tail else None,
            )
            if (moved.agent, moved.domain) != (
                manifest.agent,
                manifest.domain,
            ):  # digests of the other store mean nothing
                links = (stored.get(link) if link else None for link in (manifest.previous, manifest.resumes))
                previous, resumes = links
                moved = replace(moved, previous=previous, resumes=resumes)
            stored[old] = self._txn.put_manifest(moved)
            self.manifests[stored[old]] = moved
        return stored


@contextmanager
def _malformed() -> Iterator[None]:
    """Values in an archive's documents that contradict each other are damage, wherever they show."""
    try:
        yield
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError, MemoryError) as error:
        raise DamageError("a document in the archive is malformed", _HINT) from error


def _damage(found: StoredObject) -> DamageError:
    return DamageError(f"{found} in the archive is not what amem would have written", _HINT)


def _page(found: StoredObject, data: bytes) -> Page:
    page = decode_page(data, str(found))
    if encode(page) != data:
        raise _damage(found)
    return page


def _is_sound(manifest: Manifest) -> bool:
    """Whether a manifest's own figures can be true."""
    turns = all(turn.start <= turn.end <= manifest.tokens for turn in manifest.turns)
    groups = all(group.layer_kind.is_sound(group) for group in manifest.groups)
    return turns and groups and manifest.cached <= manifest.tokens


def _block_header(keys: tuple[Domain, dict[str, list[str]]], manifest: Manifest, row: BlockRow) -> BlockHeader:
    domain, chains = keys
    place, chain = row.position // BLOCK_TOKENS, chains[row.group]
    return BlockHeader(
        domain=domain.id,
        model=manifest.model.fingerprint,
        codec=manifest.codec.name,
        group=row.group,
        position=row.position,
        prefix_key=chain[place],
        parent_key=chain[place - 1] if place else "",
    )


def _tail_header(domain: Domain, manifest: Manifest, tokens: int) -> TailHeader:
    return TailHeader(
        domain=domain.id,
        salt=domain.salt,
        codec=manifest.codec.name,
        model=manifest.model.fingerprint,
        position=manifest.cached - tokens,
        tokens=tokens,
    )


def _split(data: bytes, start: int, parts: Sequence[Part]) -> list[Buffer]:
    """The buffer of each part, as views of a file's bytes."""
    view = memoryview(data)
    buffers: list[Buffer] = []
    for part in parts:
        buffers.append(view[start : start + part.nbytes])
        start += part.nbytes
    return buffers
