"""TODO."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvstore.format.layout import StoreLayout

KINDS = ("manifests", "pages", "tails", "blocks")
"""The folders of a domain, in the order in which they may be emptied: a manifest goes before what it names."""


class StoredObject(NamedTuple):
    """A file of a domain: the folder it is in, and the SHA-256 that names it."""

    kind: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.kind.removesuffix('s')} sha256:{self.sha256}"

    def path(self, layout: StoreLayout, domain_id: str) -> Path:
        suffix = ".safetensors" if self.kind in ("blocks", "tails") else ".json"
        return layout.root.joinpath("domains", domain_id, self.kind, self.sha256[:2], f"{self.sha256}{suffix}")


def stored_objects(layout: StoreLayout, domain_id: str) -> list[StoredObject]:
    """Every file in a domain that is named as an object, whether or not anything leads to it, by kind and name."""
    found = [stored for stored, _ in list_domain(layout, domain_id) if stored]
    return sorted(found, key=lambda stored: (KINDS.index(stored.kind), stored.sha256))


def list_domain(layout: StoreLayout, domain_id: str) -> Iterator[tuple[StoredObject | None, "os.DirEntry[str]"]]:
    """Every entry of a domain's folders but the folders themselves; None where it is no object. Follows no link."""
    for entry in _scan(layout.domain(domain_id)):
        if entry.name in KINDS and entry.is_dir(follow_symlinks=False):
            for shard in _scan(entry.path):
                if shard.is_dir(follow_symlinks=False):
                    yield from ((_object(entry.name, shard.name, found), found) for found in _scan(shard.path))
                else:
                    yield None, shard
        elif entry.name != "domain.json":
            yield None, entry


def _scan(folder: Path | str) -> Iterator["os.DirEntry[str]"]:
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except (FileNotFoundError, NotADirectoryError):  # a folder that gc or an erasure has just emptied
        return


def _object(kind: str, shard: str, entry: "os.DirEntry[str]") -> StoredObject | None:
    sha256, _, suffix = entry.name.partition(".")
    wanted = "safetensors" if kind in ("blocks", "tails") else "json"
    named = suffix == wanted and len(sha256) == 64 and sha256[:2] == shard and not set(sha256) - set("0123456789abcdef")
    return StoredObject(kind, sha256) if named and entry.is_file(follow_symlinks=False) else None


def size_of(layout: StoreLayout, domain_id: str, found: StoredObject) -> int:
    """Bytes on disk; 0 where it is missing."""
    try:
        return os.lstat(found.path(layout, domain_id)).st_size
    except FileNotFoundError:
        return 0


def strangers(layout: StoreLayout) -> list[Path]:
    """What stands beside a store's own files and folders, and beside its domains."""
    known = {path.relative_to(layout.root).parts[0] for path in layout.folders()}
    known |= {path.name for path in (layout.format, layout.journal, layout.index, layout.ballast)}
    known.add(f"{layout.index.name}-journal")
    found = [path for path in layout.root.iterdir() if path.name not in known]
    return found + [path for path in layout.domains.iterdir() if not path.is_dir() or path.is_symlink()]
