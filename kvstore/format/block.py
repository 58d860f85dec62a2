"""Block and tail files: plain safetensors, whose data start on a 4 KiB boundary.

A block is read with `preadv` straight into the arrays that attention will use, in slices that are hashed while they
are still in the CPU's cache. Everything heavy here releases the GIL, so several threads can read at once.
"""

import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import xxhash
from msgspec import Struct

from kvstore.disk import files
from kvstore.disk.canonical_json import load
from kvstore.disk.files import Buffer
from kvstore.errors import DamageError
from kvstore.format.kinds import name_at
from kvstore.format.parts import Part

ALIGNMENT = 4096  # bytes
MAX_HEADER = 1 << 20  # bytes; real ones have 4 KiB, or a few times that
SLICE = 1 << 20  # bytes
_LEAD = b'{"__metadata__":'


class Header(Struct, frozen=True):
    """What a block or a tail says of itself, as the metadata of its file."""

    def metadata(self) -> dict[str, str]:
        """The fields as text."""
        return {name: str(getattr(self, name)) for name in self.__struct_fields__}


class BlockHeader(Header, frozen=True):
    """What a block says of itself. `parent_key` is "" at position 0."""

    domain: str
    model: str  # fingerprint
    codec: str
    group: str
    position: int
    prefix_key: str
    parent_key: str
    format: int = 1


class TailHeader(Header, frozen=True):
    """What a tail says of itself: it holds `tokens` tokens from `position` on."""

    domain: str
    salt: str
    codec: str
    model: str  # fingerprint
    position: int
    tokens: int
    format: int = 1


class FileDigest(Struct, frozen=True):
    """SHA-256 and xxh3-64 of a whole file, in hex, and its size in bytes."""

    sha256: str
    xxh3: str
    bytes: int


def encode_header(metadata: Mapping[str, str], parts: Sequence[Part]) -> bytes:
    """The head of a safetensors file: `parts` follow it without gaps, in that order."""
    text = _LEAD + json.dumps(dict(metadata), separators=(",", ":")).encode() + _entries(tuple(parts))
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


@lru_cache
def _entries(parts: tuple[Part, ...]) -> bytes:
    """The end of a header: all of it that depends on the parts, so that a reader can compare it without parsing."""
    entries = {}
    offset = 0
    for part in parts:
        end = offset + part.nbytes
        entries[part.name] = {"dtype": part.dtype, "shape": list(part.shape), "data_offsets": [offset, end]}
        offset = end
    return b"," + json.dumps(entries, separators=(",", ":")).encode()[1:]


def _decode_header(path: Path, header: bytes, parts: Sequence[Part]) -> dict[str, str]:
    """The metadata of a header whose parts must be `parts`."""
    end = header.find(_entries(tuple(parts)))
    if end < 0 or not header.startswith(_LEAD, 8):
        raise damaged(path, "holds other parts than expected")
    return _parse(path, header[8 + len(_LEAD) : end])


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    values = load(text)
    if values is None:
        raise damaged(path, "has no readable header")
    return values


def check_buffers(parts: Sequence[Part], buffers: Sequence[Buffer]) -> None:
    """Raises ValueError unless each buffer is as large as its part."""
    if [part.nbytes for part in parts] != [memoryview(buffer).nbytes for buffer in buffers]:
        raise ValueError("buffers and parts differ in number or size")


def _slices(views: Sequence[Buffer]) -> Iterator[list[memoryview]]:
    """All bytes of `views` in order, in lists of views that hold SLICE bytes together."""
    views = [view for view in views if memoryview(view).nbytes]  # an empty one cannot be cast
    batch: list[memoryview] = []
    room = SLICE
    if sum(memoryview(view).nbytes for view in views) <= SLICE:  # most blocks
        yield [memoryview(view).cast("B") for view in views]
        return
    for view in views:
        rest = memoryview(view).cast("B")
        while len(rest):
            piece, rest = rest[:room], rest[room:]
            batch.append(piece)
            room -= len(piece)
            if not room:
                yield batch
                batch, room = [], SLICE
    if batch:
        yield batch


def digest(buffers: Sequence[Buffer]) -> FileDigest:
    """The digest that a file of these bytes has."""
    sha256, xxh3, size = hashlib.sha256(), xxhash.xxh3_64(), 0
    for pieces in _slices(buffers):
        for piece in pieces:
            sha256.update(piece)
            xxh3.update(piece)
            size += len(piece)
    return FileDigest(sha256.hexdigest(), xxh3.hexdigest(), size)


def damaged(path: Path, how: str) -> DamageError:
    """The error of a file that is named by its digest."""
    return DamageError(f"{name_at(path)} {how}", "`amem verify` lists the affected agents")


def read_parts(
    path: Path, nbytes: int, xxh3: str, parts: Sequence[Part], buffers: Sequence[memoryview]
) -> dict[str, str]:
    """Read a block or a tail of `nbytes` bytes into `buffers`, one writable C-contiguous buffer for each part.

    Returns the metadata. Raises DamageError, naming the digest, where the file is missing, of another size, altered,
    or of other parts; the content of `buffers` is then undefined.
    """
    check_buffers(parts, buffers)
    head = nbytes - sum(part.nbytes for part in parts)
    if not 8 < head <= MAX_HEADER:
        raise damaged(path, "holds other parts than expected")
    try:
        with files.reading(path) as (descriptor, size):
            if size != nbytes:
                raise damaged(path, f"has {size} bytes instead of {nbytes}")
            header = _read_into(descriptor, path, head, buffers, xxh3)
    except FileNotFoundError as error:
        raise damaged(path, "is missing") from error
    return _decode_header(path, header, parts)


def _read_into(descriptor: int, path: Path, head: int, buffers: Sequence[memoryview], xxh3: str) -> bytes:
    """Read `head` bytes, which are returned, and then all of `buffers`, and check the checksum over both."""
    header = os.pread(descriptor, head, 0)
    hasher = xxhash.xxh3_64(header)
    offset = head
    for pieces in _slices(buffers):
        offset += os.preadv(descriptor, pieces, offset)
        for piece in pieces:
            hasher.update(piece)
    if hasher.hexdigest() != xxh3:
        raise damaged(path, "is altered: its checksum differs")
    return header


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a block or a tail, without its data and without any check of them. Raises DamageError."""
    try:
        with files.reading(path) as (descriptor, _):
            length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
            header = os.pread(descriptor, min(length, MAX_HEADER), 8)
    except FileNotFoundError as error:
        raise damaged(path, "is missing") from error
    metadata = _parse(path, header).get("__metadata__")
    if not isinstance(metadata, dict):
        raise damaged(path, "has no readable header")
    return metadata


def is_intact(path: Path, expected: FileDigest) -> bool:
    """Whether a file is there, of that size and checksum."""
    buffer = memoryview(bytearray(min(SLICE, expected.bytes)))
    hasher = xxhash.xxh3_64()
    try:
        with files.reading(path) as (descriptor, size):
            if size != expected.bytes:
                return False
            for offset in range(0, size, SLICE):
                hasher.update(buffer[: os.preadv(descriptor, [buffer], offset)])
    except (FileNotFoundError, DamageError):
        return False
    return hasher.hexdigest() == expected.xxh3
