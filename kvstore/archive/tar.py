"""The archive of an agent: an uncompressed tar whose bytes follow from its contents.

The first member, `amem.json`, lists all others with their sizes, and each is named by its SHA-256. So every byte of
the archive is known beforehand, but for the members' own, which their names prove: the reader compares headers,
padding and the end with what they must be, and interprets none of them. No path, link, device, duplicate or size in
an archive can do harm. An archive that another program packed is therefore refused.
"""

import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, BinaryIO, Literal

from msgspec import Struct

from kvstore.disk.canonical_json import dump
from kvstore.errors import AmemError, DamageError, NoStoreError
from kvstore.format.document import Count, Document, HexId, Sha256, as_dict, parse, place_of
from kvstore.format.kinds import OBJECT_KINDS, ObjectKind, StoredObject, kind_in, matches
from kvstore.format.records import Domain, Name
from kvstore.naming import check_name, file_name

FORMAT = 1
LISTING = "amem.json"
MAX_LISTING = 64 << 20  # bytes
_END = bytes(2 * tarfile.BLOCKSIZE)
_HINT = "take a whole, unchanged file that `amem export` wrote"


class ArchivedSnapshot(Document, frozen=True):
    """A snapshot that comes with an agent; `manifest` is a digest."""

    name: Name
    manifest: Sha256
    note: str | None
    created: str


class _ArchivedDomain(Document, frozen=True):
    id: HexId
    name: Name | None
    salt: Sha256
    created: str


class _ArchivedFile(Document, frozen=True):
    path: str
    bytes: Count


class _Listing(Document, frozen=True):
    """`amem.json` as it is in the archive."""

    agent: Name
    agent_id: HexId
    domain: _ArchivedDomain
    head: Sha256
    snapshots: tuple[ArchivedSnapshot, ...]
    files: tuple[_ArchivedFile, ...]
    format: Literal[1]
    kind: Literal["amem agent"]
    sha256: Sha256


class _ListingVersion(Struct):
    kind: Literal["amem agent"]
    format: int


@dataclass(frozen=True)
class Contents:
    """What an archive holds: one agent at the state `head`, and all files that it needs, with their bytes."""

    agent: str  # its name and its id, where it comes from
    agent_id: str
    domain: Domain
    head: str
    snapshots: tuple[ArchivedSnapshot, ...]
    files: tuple[tuple[StoredObject, int], ...]  # in the order in which they follow

    def document(self) -> dict[str, Any]:
        """The listing as JSON has it, its own SHA-256 included."""
        domain = self.domain
        values = {
            "agent": self.agent,
            "agent_id": self.agent_id,
            "domain": as_dict(_ArchivedDomain(domain.id, domain.name, domain.salt, domain.created)),
            "head": self.head,
            "snapshots": [as_dict(snapshot) for snapshot in self.snapshots],
            "files": [{"path": _path(found), "bytes": size} for found, size in self.files],
            "format": FORMAT,
            "kind": "amem agent",
        }
        return {**values, "sha256": sha256(dump(values)).hexdigest()}


def pieces(contents: Contents, read: Callable[[StoredObject], bytes]) -> Iterator[bytes]:
    """The bytes of an archive, piece by piece. Raises DamageError where a file has not the size that is listed."""
    yield from _member(LISTING, dump(contents.document()))
    for found, size in contents.files:
        data = read(found)
        if len(data) != size:
            raise DamageError(f"{found} changed while it was read", "export it again")
        yield from _member(_path(found), data)
    yield _END


def size_of_archive(contents: Contents) -> int:
    """Bytes of the whole archive."""
    sizes = [len(dump(contents.document())), *(size for _, size in contents.files)]
    return sum(tarfile.BLOCKSIZE + size + _padding(size) for size in sizes) + len(_END)


class Archive:
    """An archive that is read once, from its beginning to its end, from a stream that need not seek."""

    def __init__(self, stream: BinaryIO) -> None:
        """Read the listing. Raises DamageError, and NoStoreError for another version's."""
        self._stream = stream
        header = self._read(tarfile.BLOCKSIZE)
        try:
            size = tarfile.TarInfo.frombuf(header, "utf-8", "strict").size
        except (tarfile.TarError, ValueError) as error:
            raise DamageError("this is not an archive of an agent", _HINT) from error
        if not 0 < size <= MAX_LISTING or header != self.header_of_listing(size):
            raise DamageError("this is not an archive of an agent", _HINT)
        self.contents = _decode(self._body(size))
        self._left = list(self.contents.files)

    def members(self, *kinds: ObjectKind) -> Iterator[tuple[StoredObject, bytes]]:
        """The next members of these kinds, each checked against its name. Raises DamageError."""
        while self._left and self._left[0][0].kind in kinds:
            found, size = self._left.pop(0)
            if self._read(tarfile.BLOCKSIZE) != _header(_path(found), size):
                raise DamageError(f"{found} is not at its place in the archive", _HINT)
            data = self._body(size)
            if not matches(found, data):
                raise DamageError(f"{found} is altered in the archive", _HINT)
            yield found, data

    def finish(self) -> None:
        """Check that all was read, and that nothing follows. Raises DamageError."""
        if self._left or self._read(len(_END)) != _END or self._stream.read(1):
            raise DamageError("the archive has bytes after its end", _HINT)

    @staticmethod
    def header_of_listing(size: int) -> bytes:
        """The header that a listing of `size` bytes must have."""
        return _header(LISTING, size)

    def _body(self, size: int) -> bytes:
        data = self._read(size)
        if any(self._read(_padding(size))):
            raise DamageError("the archive is altered between two files", _HINT)
        return data

    def _read(self, size: int) -> bytes:
        data = self._stream.read(size)
        if len(data) != size:
            raise DamageError("the archive is cut short", _HINT)
        return data


def _path(found: StoredObject) -> str:
    return f"{found.kind.folder}/{found.kind.file_name(found.sha256)}"


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o600
    return info.tobuf(tarfile.USTAR_FORMAT)


def _padding(size: int) -> int:
    return -size % tarfile.BLOCKSIZE


def _member(name: str, data: bytes) -> Iterator[bytes]:
    yield _header(name, len(data))
    yield data
    yield bytes(_padding(len(data)))


def _decode(data: bytes) -> Contents:
    try:
        version = parse(data, _ListingVersion)
    except ValueError as error:
        raise DamageError("this is not an archive of an agent", _HINT) from error
    if version.format != FORMAT:
        raise NoStoreError("the archive was written by another version of amem", "use the version that wrote it")
    try:
        contents = _contents(parse(data, _Listing))
    except (ValueError, AmemError) as error:
        place = place_of(error) if isinstance(error, ValueError) else ""
        raise DamageError(f"the archive's listing is malformed{place}", _HINT) from error
    names = {file_name(snapshot.name) for snapshot in contents.snapshots}
    kinds = [OBJECT_KINDS.index(found.kind) for found, _ in contents.files]
    one_of_each = len({found for found, _ in contents.files}) == len(kinds) and len(names) == len(contents.snapshots)
    if not one_of_each or kinds != sorted(kinds) or dump(contents.document()) != data:
        raise DamageError("the archive's listing is not one that amem writes", _HINT)
    return contents


def _contents(listing: _Listing) -> Contents:
    """What a listing lists. Raises UsageError for a name that no agent may have, ValueError for an unknown file."""
    domain = listing.domain
    for kind, name in (("agent", listing.agent), ("domain", domain.name)):
        if name is not None:
            check_name(kind, name)
    for snapshot in listing.snapshots:
        check_name("snapshot", snapshot.name)
    return Contents(
        agent=listing.agent,
        agent_id=listing.agent_id,
        domain=Domain(domain.id, domain.name, domain.salt, domain.created),
        head=listing.head,
        snapshots=listing.snapshots,
        files=tuple(_file(listed) for listed in listing.files),
    )


def _file(listed: _ArchivedFile) -> tuple[StoredObject, int]:
    folder, _, name = listed.path.partition("/")
    kind = kind_in(folder)
    sha256 = kind.digest_of(name) if kind else None
    if kind and sha256 is not None and 0 < listed.bytes <= kind.max_bytes:
        return StoredObject(kind, sha256), listed.bytes
    raise ValueError("not a file of an agent")
