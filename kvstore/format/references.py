"""What documents name: the one table of a state's files, and the one table of the states before it.

gc, verify, export, erasure, usage, repair and the commit itself follow these tables and nothing else. A new field of a
manifest or a page that names files is one entry here. Files that no entry names are deleted by the next gc.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from msgspec import Struct

from kvstore.format.kinds import BLOCK, PAGE, TAIL, ObjectKind, StoredObject
from kvstore.format.manifest import BlockRow, FileRow, Manifest, decode_page_blocks

Row = BlockRow | FileRow


class NamedFile(NamedTuple):
    """A file that a document names, and its size in bytes."""

    object: StoredObject
    bytes: int


class StateReference(Struct, frozen=True):
    """A field of a manifest that names files of one kind."""

    field: str
    kind: ObjectKind
    rows: Callable[[Manifest], Iterable[Row]]


class ObjectReference(Struct, frozen=True):
    """Objects of one kind that name files of another. `rows` reads them from bytes: (bytes, name in errors)."""

    source: ObjectKind
    kind: ObjectKind
    rows: Callable[[bytes, str], Iterable[Row]]


STATE_REFERENCES: tuple[StateReference, ...] = (
    StateReference("pages", PAGE, lambda manifest: manifest.pages),
    StateReference("window_blocks", BLOCK, lambda manifest: manifest.window_blocks),
    StateReference("tail", TAIL, lambda manifest: (manifest.tail,) if manifest.tail else ()),
)
OBJECT_REFERENCES: tuple[ObjectReference, ...] = (ObjectReference(PAGE, BLOCK, decode_page_blocks),)
STATE_LINKS = ("previous", "resumes")
"""The fields of a manifest that name other states of its domain."""


def rows_of(manifest: Manifest) -> Iterator[tuple[ObjectKind, Row]]:
    """The rows of all files that a manifest itself names, with their kinds."""
    for reference in STATE_REFERENCES:
        for row in reference.rows(manifest):
            yield reference.kind, row


def named_by(manifest: Manifest) -> Iterator[NamedFile]:
    """The files that a manifest itself names."""
    for kind, row in rows_of(manifest):
        yield NamedFile(StoredObject(kind, row.sha256), row.bytes)


def rows_of_object(found: StoredObject, read: Callable[[], bytes]) -> Iterator[tuple[ObjectKind, Row]]:
    """The rows of all files that an object other than a manifest names. `read` gives its bytes, if they are needed.

    Raises DamageError for bytes that are not such a document.
    """
    for reference in OBJECT_REFERENCES:
        if reference.source is found.kind:
            for row in reference.rows(read(), str(found)):
                yield reference.kind, row


def earlier_states(manifest: Manifest) -> list[str]:
    """The digests of the states that this one continues."""
    return [digest for field in STATE_LINKS if (digest := getattr(manifest, field))]
