"""Which files the refs of one domain lead to, and who holds them: what an erasure must leave in place.

A state leads to its manifest, pages, blocks and tail. An agent leads to its head, its snapshots, and all kept states
before them; a fork also to the one state that it came from, not into the other agent's history.
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from kvstore import files
from kvstore.errors import AmemError
from kvstore.layout import Layout
from kvstore.locks import lock_folder
from kvstore.manifest import Manifest
from kvstore.reader import Reader

KINDS = ("manifests", "pages", "tails", "blocks")
"""The folders of a domain, in the order in which they may be emptied: a manifest goes before what it names."""


class StoredObject(NamedTuple):
    """A file of a domain: the folder it is in, and the SHA-256 that names it."""

    kind: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.kind.removesuffix('s')} sha256:{self.sha256}"

    def path(self, layout: Layout, domain_id: str) -> Path:
        suffix = ".safetensors" if self.kind in ("blocks", "tails") else ".json"
        return layout.root.joinpath("domains", domain_id, self.kind, self.sha256[:2], f"{self.sha256}{suffix}")


class Reach:
    """The objects of one domain that holders lead to; each page is read once."""

    def __init__(self, reader: Reader, domain_id: str) -> None:
        self.holders: dict[StoredObject, set[str]] = defaultdict(set)
        self._reader = reader
        self._domain = domain_id
        self._pages: dict[str, list[StoredObject]] = {}

    def mark(self, holder: str, agent_id: str, roots: Iterable[str], *, lenient: bool = False) -> None:
        """Mark what `roots`, states of the agent `agent_id`, lead to.

        Raises DamageError for what cannot be read, and for a missing root; `lenient` passes over them.
        """
        roots = set(roots)
        todo: list[str | None] = [*roots]
        seen: set[str] = set()
        while todo:
            digest = todo.pop()
            if digest is None or digest in seen:
                continue
            if digest not in roots and not self._reader.has_manifest(self._domain, digest):
                continue  # gc has taken it from the history
            seen.add(digest)
            self.holders[StoredObject("manifests", digest)].add(holder)
            try:
                manifest = self._reader.manifest(self._domain, digest)
                named = self._named(manifest)
            except AmemError:
                if lenient:
                    continue
                raise
            for found in named:
                self.holders[found].add(holder)
            if manifest.agent == agent_id:
                todo += (manifest.previous, manifest.resumes)

    def _named(self, manifest: Manifest) -> list[StoredObject]:
        """The files that a manifest names."""
        named = [StoredObject("blocks", row.sha256) for row in manifest.window_blocks]
        named += [StoredObject("tails", manifest.tail.sha256)] if manifest.tail else []
        for page in manifest.pages:
            if page.sha256 not in self._pages:
                rows = self._reader.page(self._domain, page).blocks
                self._pages[page.sha256] = [StoredObject("blocks", row.sha256) for row in rows]
            named += [StoredObject("pages", page.sha256), *self._pages[page.sha256]]
        return named


def stored_objects(layout: Layout, domain_id: str) -> list[StoredObject]:
    """Every file in a domain that is named as an object, whether or not anything leads to it, by kind and name."""
    found = [stored for stored, _ in list_domain(layout, domain_id) if stored]
    return sorted(found, key=lambda stored: (KINDS.index(stored.kind), stored.sha256))


def list_domain(layout: Layout, domain_id: str) -> Iterator[tuple[StoredObject | None, "os.DirEntry[str]"]]:
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


def size_of(layout: Layout, domain_id: str, found: StoredObject) -> int:
    """Bytes on disk; 0 where it is missing."""
    try:
        return os.lstat(found.path(layout, domain_id)).st_size
    except FileNotFoundError:
        return 0


def live_pins(layout: Layout) -> set[str]:
    """What transactions under way hold, as digests and domain ids. Stable under the exclusive store lock."""
    pins: set[str] = set()
    for folder in layout.staging.iterdir():
        descriptor = lock_folder(folder)
        if descriptor is not None:  # its writer is dead
            os.close(descriptor)
            continue
        try:
            pins.update(files.read(folder / "pins").decode().split())
        except FileNotFoundError:
            continue
    return pins
