"""What is on disk: the objects of a domain, and what does not belong in a store."""

import os
from collections.abc import Iterator
from pathlib import Path

from kvstore.format.kinds import DOMAIN, OBJECT_KINDS, ObjectKind, StoredObject, kind_in
from kvstore.format.layout import StoreLayout


def stored_objects(layout: StoreLayout, domain_id: str) -> list[StoredObject]:
    """All objects on disk in a domain, reachable or not, by kind and name."""
    found = [stored for stored, _ in list_domain(layout, domain_id) if stored]
    return sorted(found, key=lambda stored: (OBJECT_KINDS.index(stored.kind), stored.sha256))


def list_domain(layout: StoreLayout, domain_id: str) -> Iterator[tuple[StoredObject | None, "os.DirEntry[str]"]]:
    """Every entry of a domain's folders but the folders themselves; None where it is no object. Follows no link."""
    for entry in _scan(layout.domain(domain_id)):
        kind = kind_in(entry.name)
        if kind and entry.is_dir(follow_symlinks=False):
            for shard in _scan(entry.path):
                if shard.is_dir(follow_symlinks=False):
                    yield from ((_object(kind, shard.name, found), found) for found in _scan(shard.path))
                else:
                    yield None, shard
        elif entry.name != DOMAIN.file:
            yield None, entry


def _scan(folder: Path | str) -> Iterator["os.DirEntry[str]"]:
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except (FileNotFoundError, NotADirectoryError):  # a folder that gc or an erasure has just emptied
        return


def _object(kind: ObjectKind, shard: str, entry: "os.DirEntry[str]") -> StoredObject | None:
    sha256 = kind.digest_of(entry.name)
    named = sha256 is not None and sha256[:2] == shard and entry.is_file(follow_symlinks=False)
    return StoredObject(kind, sha256) if sha256 is not None and named else None


def find_objects(layout: StoreLayout, domain_id: str, prefix: str) -> Iterator[StoredObject]:
    """The objects of a domain whose SHA-256 begins with `prefix`, at least two hex digits."""
    for kind in OBJECT_KINDS:
        for path in (layout.domain(domain_id) / kind.folder / prefix[:2]).glob(f"{prefix}*{kind.suffix}"):
            if sha256 := kind.digest_of(path.name):
                yield StoredObject(kind, sha256)


def size_of(layout: StoreLayout, domain_id: str, found: StoredObject) -> int:
    """Bytes on disk; 0 where it is missing."""
    try:
        return os.lstat(layout.object(domain_id, *found)).st_size
    except FileNotFoundError:
        return 0


def domain_folders(layout: StoreLayout) -> list[str]:
    """The ids of all domains that have a folder, in order."""
    return sorted(path.name for path in layout.domains.iterdir() if path.is_dir() and not path.is_symlink())


def foreign_files(layout: StoreLayout) -> list[Path]:
    """Files and folders that are not the store's own, at its top and among its domains."""
    known = {path.relative_to(layout.root).parts[0] for path in layout.folders()}
    known |= {path.name for path in (layout.format, layout.journal, layout.index, layout.ballast)}
    known.add(f"{layout.index.name}-journal")
    found = [path for path in layout.root.iterdir() if path.name not in known]
    return found + [path for path in layout.domains.iterdir() if not path.is_dir() or path.is_symlink()]
