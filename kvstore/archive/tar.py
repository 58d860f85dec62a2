"""The file that an agent travels in: an uncompressed tar, whose bytes follow from what is in it.

The first member, `amem.json`, lists all others with their sizes, and each is named by its SHA-256. So every byte of
the archive is known beforehand but for the members' own, which their names prove: the reader compares headers,
padding and the end with what they must be, and interprets none of them. There is no path, link, device, duplicate or
size that an archive could play a trick with. One that another program packed is therefore refused.
"""

import re
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any, BinaryIO

from kvstore.disk.canonical_json import dump, load
from kvstore.errors import AmemError, DamageError, NoStoreError
from kvstore.format.records import Domain
from kvstore.graph.objects import KINDS, StoredObject
from kvstore.naming import check_name, file_name

FORMAT = 1
LISTING = "amem.json"
MAX_LISTING = 64 << 20  # bytes
MAX_DOCUMENT = 64 << 20  # of a manifest or a page
MAX_TENSORS = 1 << 30  # of a block or a tail
_SUFFIX = {"manifests": "json", "pages": "json", "tails": "safetensors", "blocks": "safetensors"}
_END = bytes(2 * tarfile.BLOCKSIZE)
_ID = re.compile("[0-9a-f]{32}")
_SHA256 = re.compile("[0-9a-f]{64}")
_HINT = "take a whole, unchanged file that `amem export` wrote"


@dataclass(frozen=True)
class ArchivedSnapshot:
    """A snapshot that comes with an agent; `manifest` is a digest."""

    name: str
    manifest: str
    note: str | None
    created: str


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
        listed = [{"path": _path(found), "bytes": size} for found, size in self.files]
        values = {**asdict(self), "files": listed, "format": FORMAT, "kind": "amem agent"}
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
            raise DamageError("that is no archive of an agent", _HINT) from error
        if not 0 < size <= MAX_LISTING or header != _header(LISTING, size):
            raise DamageError("that is no archive of an agent", _HINT)
        self.contents = _decode(self._body(size))
        self._left = list(self.contents.files)

    def members(self, kinds: tuple[str, ...]) -> Iterator[tuple[StoredObject, bytes]]:
        """The next members, as far as they are of these kinds, each checked against its name. Raises DamageError."""
        while self._left and self._left[0][0].kind in kinds:
            found, size = self._left.pop(0)
            if self._read(tarfile.BLOCKSIZE) != _header(_path(found), size):
                raise DamageError(f"the archive does not hold {found} where it should", _HINT)
            data = self._body(size)
            if sha256(data).hexdigest() != found.sha256:
                raise DamageError(f"{found} is altered in the archive", _HINT)
            yield found, data

    def finish(self) -> None:
        """Check that all was read, and that nothing follows. Raises DamageError."""
        if self._left or self._read(len(_END)) != _END or self._stream.read(1):
            raise DamageError("the archive goes on behind its end", _HINT)

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
    return f"{found.kind}/{found.sha256}.{_SUFFIX[found.kind]}"


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
    values = load(data)
    if values is None or values.get("kind") != "amem agent":
        raise DamageError("that is no archive of an agent", _HINT)
    if values.get("format") != FORMAT:
        raise NoStoreError("the archive was written by another version of amem", "use the version that wrote it")
    try:
        contents = Contents(
            agent=check_name("agent", values["agent"]),
            agent_id=_matched(_ID, values["agent_id"]),
            domain=_domain(values["domain"]),
            head=_matched(_SHA256, values["head"]),
            snapshots=tuple(ArchivedSnapshot(**snapshot) for snapshot in values["snapshots"]),
            files=tuple(_file(**listed) for listed in values["files"]),
        )
        names = {file_name(check_name("snapshot", snapshot.name)) for snapshot in contents.snapshots}
        kinds = [KINDS.index(found.kind) for found, _ in contents.files]
    except (TypeError, ValueError, KeyError, AttributeError, AmemError) as error:
        raise DamageError("the archive's listing is malformed", _HINT) from error
    one_of_each = len({found for found, _ in contents.files}) == len(kinds) and len(names) == len(contents.snapshots)
    if not one_of_each or kinds != sorted(kinds) or dump(contents.document()) != data:
        raise DamageError("the archive's listing is not one that amem writes", _HINT)
    return contents


def _domain(values: dict[str, Any]) -> Domain:
    domain = Domain(**values)
    _matched(_ID, domain.id)
    _matched(_SHA256, domain.salt)
    if domain.name is not None:
        check_name("domain", domain.name)
    if not isinstance(domain.created, str):
        raise ValueError
    return domain


def _file(path: str, bytes: int) -> tuple[StoredObject, int]:  # noqa: A002 (the listing's word)
    kind, _, name = path.partition("/")
    digest, _, suffix = name.partition(".")
    limit = MAX_DOCUMENT if suffix == "json" else MAX_TENSORS
    if _SUFFIX.get(kind) != suffix or type(bytes) is not int or not 0 < bytes <= limit:
        raise ValueError
    return StoredObject(kind, _matched(_SHA256, digest)), bytes


def _matched(pattern: re.Pattern[str], text: str) -> str:
    if not pattern.fullmatch(text):
        raise ValueError
    return text
