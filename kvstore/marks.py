"""Marking: from refs to the files of a domain that must stay.

A ref leads to its state, to some states before it, and to the one state that each of these took over by a restore or
a fork. A state leads to its manifest, pages, blocks and tail. History ends at an evicted state: what is before it went
with the eviction, unless something else holds it.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvstore import refs
from kvstore.errors import AmemError, DamageError
from kvstore.journal import VOID, read_journal
from kvstore.layout import Layout
from kvstore.manifest import Manifest
from kvstore.reach import StoredObject, size_of
from kvstore.reader import Reader

EVICT = "evict"  # the op of a state that holds tokens and feeds only
ENDS = (refs.REMOVE, refs.ERASE, VOID)  # of lines after which an agent may have gone


@dataclass(frozen=True)
class Root:
    """A ref: where marking begins. An agent's has no `snapshot`, a snapshot's was never `updated`."""

    path: Path
    agent: str
    agent_id: str
    domain: str
    manifest: str
    snapshot: str | None
    updated: str | None
    created: str
    note: str | None = None

    def __str__(self) -> str:
        return f"{self.agent}@{self.snapshot}" if self.snapshot else self.agent


def ref_paths(layout: Layout) -> list[Path]:
    """The files of all refs: agents, then snapshots."""
    folders = [path for path in _children(layout.snapshot_refs) if path.is_dir() and not path.is_symlink()]
    return [*_children(layout.agent_refs), *(path for folder in folders for path in _children(folder))]


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except FileNotFoundError:
        return []


def read_root(layout: Layout, path: Path) -> Root | None:
    """The ref at `path`, None where there is none any more. Raises DamageError."""
    if path.parent == layout.agent_refs:
        agent = refs.read_agent(layout, path.name)
        if agent is None:
            return None
        root = Root(path, agent.name, agent.id, agent.domain, agent.manifest, None, agent.updated, agent.created)
    else:
        made = refs.read_snapshot(layout, path.parent.name, path.name)
        if made is None:
            return None
        ids = (made.agent_id, made.domain, made.manifest)
        root = Root(path, made.agent, *ids, made.name, None, made.created, made.note)
    if path not in (layout.agent_ref(root.agent), layout.snapshot_ref(root.agent, root.snapshot or "")):
        raise DamageError(f"{path} is altered: it holds another name", "run `amem verify` to see what it hurts")
    return root


def find_orphans(layout: Layout, roots: Iterable[Root]) -> set[Root]:
    """Snapshots whose agent has gone, as the journal says: left by a removal or an import that was cut off.

    One whose agent is merely not there is damaged, or lacks it: it is none of them.
    """
    roots = list(roots)
    agents = {root.agent_id for root in roots if root.snapshot is None}
    alone = {root for root in roots if root.agent_id not in agents}
    gone: set[str] = set()
    if alone:
        with suppress(DamageError):
            gone.update(entry.change.agent_id for entry in read_journal(layout.journal) if entry.change.op in ENDS)
    return {root for root in alone if root.agent_id in gone}


def has_agent(layout: Layout, root: Root) -> bool:
    """Whether the agent of a ref is there, now. Raises DamageError."""
    agent = refs.read_agent(layout, root.agent)
    return agent is not None and agent.id == root.agent_id


def direct(manifest: Manifest) -> Iterator[tuple[StoredObject, int]]:
    """What a manifest names itself, and the bytes of each: pages, window blocks and the tail."""
    for row in manifest.pages:
        yield StoredObject("pages", row.sha256), row.bytes
    for block in manifest.window_blocks:
        yield StoredObject("blocks", block.sha256), block.bytes
    if manifest.tail:
        yield StoredObject("tails", manifest.tail.sha256), manifest.tail.bytes


@dataclass(frozen=True)
class Marked:
    """What a root added: bytes that were not marked before, and the numbers of the roots that had marked the rest."""

    bytes: int
    shared_with: frozenset[int]


class Marks:
    """The objects of one domain that roots lead to. Each page is read once, whatever leads to it."""

    def __init__(self, reader: Reader, domain_id: str) -> None:
        self.owners: dict[StoredObject, int] = {}  # → the number of the root that marked it first
        self.bytes = 0
        self._reader = reader
        self._domain = domain_id
        self._walked: dict[str, int] = {}  # manifest → how much history was followed from it; -1: it alone

    def add(self, number: int, manifest: str, history: int) -> Marked:
        """Mark a state, up to `history` states before it, and what they resume.

        Raises DamageError where a manifest or a page is damaged; a missing one of the history has been collected.
        """
        before, shared = self.bytes, set()
        todo = [(manifest, history)]
        while todo:
            digest, depth = todo.pop()
            if self._walked.get(digest, -2) >= depth:
                shared.add(self.owners[StoredObject("manifests", digest)])
            elif digest == manifest or self._reader.has_manifest(self._domain, digest):
                found = self._reader.manifest(self._domain, digest)
                self._walked[digest] = depth
                shared |= self._mark_state(number, digest, found)
                todo += _earlier(found, depth)
        return Marked(self.bytes - before, frozenset(shared - {number}))

    def _mark_state(self, number: int, digest: str, manifest: Manifest) -> set[int]:
        own = StoredObject("manifests", digest)
        owners = {self._mark(number, own, size_of(self._reader.layout, self._domain, own))}
        owners |= {self._mark(number, found, size) for found, size in direct(manifest) if found.kind != "pages"}
        for row in manifest.pages:
            page = StoredObject("pages", row.sha256)
            if page not in self.owners:
                for block in self._reader.page_blocks(self._domain, row.sha256):
                    owners.add(self._mark(number, StoredObject("blocks", block.sha256), block.bytes))
            owners.add(self._mark(number, page, row.bytes))
        return owners

    def _mark(self, number: int, found: StoredObject, size: int) -> int:
        if found not in self.owners:
            self.owners[found] = number
            self.bytes += size
        return self.owners[found]


def _earlier(manifest: Manifest, depth: int) -> Iterator[tuple[str, int]]:
    if manifest.resumes and depth >= 0:
        yield manifest.resumes, -1
    if manifest.previous and depth > 0 and manifest.op != EVICT:
        yield manifest.previous, depth - 1


def whose(reader: Reader, wanted: Mapping[str, set[StoredObject]]) -> dict[tuple[str, StoredObject], set[str]]:
    """The agents that need objects (by domain) now: refs are read again, and all kept history is followed.

    What nobody leads to has no entry. A file that was seen missing before this is called is then no damage: gc and
    erasures unlink a manifest before what it names, so they have taken the file.
    """
    found: dict[tuple[str, StoredObject], set[str]] = defaultdict(set)
    for root in _readable_roots(reader.layout):
        for needed in _needed(reader, root, wanted.get(root.domain, set())):
            found[root.domain, needed].add(root.agent)
    return found


def _needed(reader: Reader, root: Root, wanted: set[StoredObject]) -> Iterator[StoredObject]:
    """Which of `wanted` the kept states that a ref leads to need, as far as they can be read."""
    todo = [root.manifest] if wanted else []
    seen: set[str] = set()
    while todo:
        digest = todo.pop()
        if digest in seen or (digest != root.manifest and not reader.has_manifest(root.domain, digest)):
            continue
        seen.add(digest)
        if (own := StoredObject("manifests", digest)) in wanted:
            yield own
        with suppress(AmemError):
            manifest = reader.manifest(root.domain, digest)
            yield from (named for named, _ in direct(manifest) if named in wanted)
            for row in manifest.pages:
                if row.sha256 not in seen:
                    seen.add(row.sha256)
                    yield from _needed_by_page(reader, root.domain, row.sha256, wanted)
            if manifest.agent == root.agent_id:
                todo += [earlier for earlier in (manifest.previous, manifest.resumes) if earlier]


def _needed_by_page(reader: Reader, domain_id: str, page: str, wanted: set[StoredObject]) -> Iterator[StoredObject]:
    with suppress(AmemError):
        yield from wanted & {StoredObject("blocks", row.sha256) for row in reader.page_blocks(domain_id, page)}


def _readable_roots(layout: Layout) -> Iterator[Root]:
    for path in ref_paths(layout):
        with suppress(AmemError):
            root = read_root(layout, path)
            if root:
                yield root
