"""TODO."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

from kvstore.errors import AmemError
from kvstore.format.manifest import Manifest
from kvstore.graph.objects import StoredObject
from kvstore.graph.roots import Root, _readable_roots
from kvstore.reader import Reader


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


def direct(manifest: Manifest) -> Iterator[tuple[StoredObject, int]]:
    """What a manifest names itself, and the bytes of each: pages, window blocks and the tail."""
    for row in manifest.pages:
        yield StoredObject("pages", row.sha256), row.bytes
    for block in manifest.window_blocks:
        yield StoredObject("blocks", block.sha256), block.bytes
    if manifest.tail:
        yield StoredObject("tails", manifest.tail.sha256), manifest.tail.bytes


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
