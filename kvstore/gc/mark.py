"""Mark: which objects of a domain are reachable from roots, and which root was first to reach each.

A root reaches its state, a bounded number of states before it, and the one state that each of these resumes
(`bounded_history`). A state reaches its manifest and every file that it names.
"""

from dataclasses import dataclass

from kvstore.format.kinds import MANIFEST, StoredObject
from kvstore.format.manifest import Manifest
from kvstore.format.references import named_by
from kvstore.graph.objects import size_of
from kvstore.graph.walk import StateWalk, bounded_history, named_by_object
from kvstore.reader import Reader


@dataclass(frozen=True)
class Marked:
    """What one root added: bytes not marked before, and the numbers of the roots that had marked the rest."""

    bytes: int
    shared_with: frozenset[int]


class Marker:
    """The reachable objects of one domain. Each page is read once, however many states name it."""

    def __init__(self, reader: Reader, domain_id: str) -> None:
        self.owners: dict[StoredObject, int] = {}  # → the number of the root that marked it first
        self.bytes = 0
        self._reader = reader
        self._domain = domain_id
        self._walk = StateWalk(reader, domain_id, bounded_history)

    def mark(self, number: int, root: str, history: int) -> Marked:
        """Mark the state `root`, up to `history` states before it, and what they resume.

        Raises DamageError where a manifest or a page is damaged; a missing one of the history has been collected.
        """
        before, shared = self.bytes, set()
        self._walk.revisited.clear()
        for digest, manifest in self._walk.visit([root], history):
            assert manifest is not None  # the walk raises for a state that cannot be read
            shared |= self._mark_state(number, digest, manifest)
        shared |= {self.owners[StoredObject(MANIFEST, digest)] for digest in self._walk.revisited}
        return Marked(self.bytes - before, frozenset(shared - {number}))

    def _mark_state(self, number: int, digest: str, manifest: Manifest) -> set[int]:
        own = StoredObject(MANIFEST, digest)
        owners = {self._mark_object(number, own, size_of(self._reader.layout, self._domain, own))}
        for named in named_by(manifest):
            if named.object not in self.owners:
                for inner in named_by_object(self._reader, self._domain, named.object):
                    owners.add(self._mark_object(number, *inner))
            owners.add(self._mark_object(number, *named))
        return owners

    def _mark_object(self, number: int, found: StoredObject, size: int) -> int:
        if found not in self.owners:
            self.owners[found] = number
            self.bytes += size
        return self.owners[found]
