"""The index: prefix key → blocks, in SQLite. It is disposable.

Without it, or where it is damaged, locked or read-only, blocks are not found and are stored again; no user ever sees
an error of it. A new one is filled from the manifests and pages. It may hold rows of deleted blocks, so that callers
check that the file exists.
"""

import os
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import closing
from typing import TypeVar

from kvstore.disk import files
from kvstore.errors import AmemError
from kvstore.format.kinds import MANIFEST, OBJECT_KINDS, StoredObject
from kvstore.format.layout import StoreLayout
from kvstore.format.manifest import BlockRow, decode_manifest
from kvstore.format.references import Row, rows_of, rows_of_object

_VERSION = 1
_TABLE = """
CREATE TABLE IF NOT EXISTS blocks (
    id INTEGER PRIMARY KEY, prefix_key TEXT, domain TEXT, layer_group TEXT, position INTEGER,
    sha256 TEXT, xxh3 TEXT, bytes INTEGER, UNIQUE (prefix_key, domain, sha256)
)"""
_ADD = """
INSERT OR IGNORE INTO blocks (domain, layer_group, position, prefix_key, sha256, xxh3, bytes)
VALUES (?, ?, ?, ?, ?, ?, ?)"""
_FIND = """
SELECT layer_group, position, prefix_key, sha256, xxh3, bytes FROM blocks
WHERE prefix_key = ? AND domain = ? ORDER BY id"""

Result = TypeVar("Result")


class Index:
    """The index of the store at `layout`. Only writers use it."""

    def __init__(self, layout: StoreLayout) -> None:
        self._layout = layout

    def find(self, domain_id: str, prefix_keys: Sequence[str]) -> list[list[BlockRow]]:
        """For each key its blocks, the first committed one first."""

        def select(db: sqlite3.Connection) -> list[list[BlockRow]]:
            return [[BlockRow(*row) for row in db.execute(_FIND, (key, domain_id))] for key in prefix_keys]

        return self._run(select, [[] for _ in prefix_keys])

    def add(self, domain_id: str, rows: Iterable[BlockRow]) -> None:
        """Add committed blocks."""
        values = [_values(domain_id, row) for row in rows]

        def insert(db: sqlite3.Connection) -> None:
            with db:
                db.executemany(_ADD, values)

        if values:
            self._run(insert, None)

    def forget(self, domain_id: str, digests: Iterable[str] | None) -> None:
        """Erase the rows of these blocks, or (None) of the whole domain; SQLite overwrites them.

        Where it cannot, the whole index goes. Raises AmemError where that fails, too.
        """
        values = None if digests is None else [(domain_id, sha256) for sha256 in digests]

        def delete(db: sqlite3.Connection) -> bool:
            with db:
                if values is None:
                    db.execute("DELETE FROM blocks WHERE domain = ?", (domain_id,))
                else:
                    db.executemany("DELETE FROM blocks WHERE domain = ? AND sha256 = ?", values)
            return True

        if not self._layout.index.exists():
            return
        if not self._run(delete, False) and not self._discard():
            raise AmemError(f"rows of erased blocks are still in {self._layout.index}", "remove that file")

    def prune(self, gone: Collection[tuple[str, str]]) -> None:
        """Remove the rows of these blocks, (domain id, SHA-256), if the index can be written."""

        def delete(db: sqlite3.Connection) -> None:
            rows = db.execute("SELECT id, domain, sha256 FROM blocks")
            with db:
                db.executemany("DELETE FROM blocks WHERE id = ?", [(n,) for n, *key in rows if tuple(key) in gone])

        if gone and self._layout.index.exists():
            self._run(delete, None)

    def listed(self, domain_id: str) -> set[str] | None:
        """The blocks of a domain that have rows. Reads only; None where the index cannot be read."""
        if not self._layout.index.exists():
            return set()
        try:
            with closing(sqlite3.connect(f"{self._layout.index.as_uri()}?mode=ro", uri=True, timeout=1)) as db:
                return {sha256 for (sha256,) in db.execute("SELECT sha256 FROM blocks WHERE domain = ?", (domain_id,))}
        except sqlite3.DatabaseError:
            return None

    def _run(self, work: Callable[[sqlite3.Connection], Result], default: Result) -> Result:
        for _ in range(2):
            try:
                files.announce("write", self._layout.index)
                with closing(self._open()) as db:
                    return work(db)
            except (sqlite3.OperationalError, OSError, AmemError):  # locked, full or read-only
                return default
            except sqlite3.DatabaseError:  # damaged: the next round makes a new one
                if not self._discard():
                    return default
        return default

    def _open(self) -> sqlite3.Connection:
        os.close(files.open_or_make(self._layout.index))  # SQLite would let everybody read it
        db = sqlite3.connect(self._layout.index, timeout=1)
        try:
            db.execute("PRAGMA secure_delete = ON")
            if db.execute("PRAGMA user_version").fetchone()[0] != _VERSION:
                self._fill(db)
        except BaseException:
            db.close()
            raise
        return db

    def _fill(self, db: sqlite3.Connection) -> None:
        with db:
            db.execute("BEGIN IMMEDIATE")
            db.execute(_TABLE)
            db.executemany(_ADD, (_values(domain, row) for domain, row in _stored_rows(self._layout)))
            db.execute(f"PRAGMA user_version = {_VERSION}")

    def _discard(self) -> bool:
        path = self._layout.index
        try:
            files.unlink(path.with_name(f"{path.name}-journal"))  # first: it must never meet a new index
            files.unlink(path)
        except AmemError:
            return False
        return True


def _values(domain_id: str, row: BlockRow) -> tuple[str, str, int, str, str, str, int]:
    return (domain_id, row.group, row.position, row.prefix_key, row.sha256, row.xxh3, row.bytes)


def _stored_rows(layout: StoreLayout) -> Iterator[tuple[str, BlockRow]]:
    """The rows of all documents that can be read, those of the oldest files first."""
    found = [(path, kind) for kind in OBJECT_KINDS if kind.is_document for path in layout.objects_of(kind)]
    for path, kind in sorted(found, key=lambda each: each[0].lstat().st_mtime_ns):
        try:
            rows = _rows_in(files.read(path), StoredObject(kind, path.stem))
            yield from ((path.parts[-4], row) for row in rows if isinstance(row, BlockRow))
        except (AmemError, FileNotFoundError):
            continue


def _rows_in(data: bytes, found: StoredObject) -> list[Row]:
    """The rows of all files that a document names. Raises AmemError."""
    rows = rows_of(decode_manifest(data)) if found.kind is MANIFEST else rows_of_object(found, lambda: data)
    return [row for _, row in rows]
