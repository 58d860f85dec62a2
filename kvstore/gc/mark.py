"""TODO."""

from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.format.manifest import Manifest
from kvstore.graph.objects import StoredObject, size_of
from kvstore.graph.walk import direct
from kvstore.reader import Reader

EVICT = "evict"  # the op of a state that holds tokens and feeds only


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
