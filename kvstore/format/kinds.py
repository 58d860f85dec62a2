"""The kinds of files in a store, and the names of content-addressed objects.

A kind is a value: what one such file is called, where it lies, its mode, its largest size, and how its bytes become a
document. Everything that lists, names, checks or deletes files goes through OBJECT_KINDS, so that a new kind is one
value here. References from a state to its objects are in `kvstore.format.references`.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from kvstore.format.document import Document
from kvstore.format.manifest import decode_manifest, decode_page
from kvstore.format.records import AgentRef, Domain, SnapshotRef

_DIGITS = frozenset("0123456789abcdef")


class RefKind(Struct, frozen=True):
    """A kind of file that is named by a user or by an id, and that changes: a ref or a domain.

    `folder` is relative to the store. `file` is the file's own name where its folder bears the id.
    """

    name: str
    folder: str
    document: type[AgentRef] | type[SnapshotRef] | type[Domain]
    file: str | None = None
    mode: int = 0o600


AGENT = RefKind("agent", "refs/agents", AgentRef)
SNAPSHOT = RefKind("snapshot", "refs/snapshots", SnapshotRef)
DOMAIN = RefKind("domain", "domains", Domain, file="domain.json")


class ObjectKind(Struct, frozen=True, eq=False):  # compared and hashed by identity: sets of objects are large
    """A kind of immutable file, named by the SHA-256 of its bytes. `folder` is relative to its domain's."""

    name: str
    folder: str
    suffix: str
    mode: int
    max_bytes: int
    decode: Callable[[bytes, str], Document] | None  # (bytes, what it is called in errors); None: tensors

    @property
    def is_document(self) -> bool:
        """Whether the file is JSON. Else it is a safetensors file with a header."""
        return self.decode is not None

    def file_name(self, sha256: str) -> str:
        return f"{sha256}{self.suffix}"

    def digest_of(self, file_name: str) -> str | None:
        """The SHA-256 in the name of a file of this kind; None where the name is not one."""
        sha256 = file_name.removesuffix(self.suffix)
        return sha256 if len(sha256) == 64 and _DIGITS.issuperset(sha256) and file_name != sha256 else None

    def __str__(self) -> str:
        return self.name

    def __lt__(self, other: "ObjectKind") -> bool:
        return self.folder < other.folder


MANIFEST = ObjectKind("manifest", "manifests", ".json", 0o600, 64 << 20, decode_manifest)
PAGE = ObjectKind("page", "pages", ".json", 0o600, 64 << 20, decode_page)
TAIL = ObjectKind("tail", "tails", ".safetensors", 0o600, 1 << 30, None)
BLOCK = ObjectKind("block", "blocks", ".safetensors", 0o400, 1 << 30, None)

OBJECT_KINDS = (MANIFEST, PAGE, TAIL, BLOCK)
"""In the order in which they are deleted and archived: a kind is before those that it names."""


def kind_named(name: str) -> ObjectKind | None:
    """The object kind of that singular name."""
    return next((kind for kind in OBJECT_KINDS if kind.name == name), None)


def kind_in(folder: str) -> ObjectKind | None:
    """The object kind whose files are in that folder of a domain."""
    return next((kind for kind in OBJECT_KINDS if kind.folder == folder), None)


class StoredObject(NamedTuple):
    """An object of a domain: its kind, and the SHA-256 that names it."""

    kind: ObjectKind
    sha256: str

    def __str__(self) -> str:
        return f"{self.kind.name} sha256:{self.sha256}"


def object_at(path: Path) -> StoredObject | None:
    """The object that a path in a domain names; None for any other path, as of a staged file."""
    kind = kind_in(path.parent.parent.name)
    return StoredObject(kind, path.name.removesuffix(kind.suffix)) if kind else None


def name_at(path: Path) -> str:
    """What messages call the file at a path."""
    return str(object_at(path) or f"file {path.name}")


def matches(found: StoredObject, data: bytes) -> bool:
    """Whether bytes have the SHA-256 that names the object."""
    return hashlib.sha256(data).hexdigest() == found.sha256
