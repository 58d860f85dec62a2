"""The one walk over states, and the files that they need.

A walk begins at the states that refs name and visits each kept state once. A state that gc has taken from the history
is passed over; a root must exist. Which earlier states are followed is the walk's `earlier`:

- `own_history(agent_id)`: all of the agent's states, and the one state of another agent that a fork took over;
- `bounded_history`: as far as gc keeps it;
- `no_history`: the roots alone.
"""

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import NamedTuple

from kvstore.errors import AmemError
from kvstore.format.kinds import MANIFEST, StoredObject
from kvstore.format.manifest import EVICT, Manifest
from kvstore.format.references import NamedFile, earlier_states, named_by, rows_of_object
from kvstore.graph.roots import Root, readable_roots
from kvstore.reader import Reader

Earlier = Callable[[Manifest, int], Iterable[tuple[str, int]]]
"""The states to follow from a state: (digest, how many states may be followed from there)."""
ReadState = Callable[[str], Manifest | None]


class Visit(NamedTuple):
    """A state that was reached. `manifest` is None where it cannot be read and the walk passes over damage."""

    digest: str
    manifest: Manifest | None


def own_history(agent_id: str) -> Earlier:
    """Follow everything from the agent's own states. A fork's source is visited and not followed."""

    def earlier(manifest: Manifest, depth: int) -> Iterator[tuple[str, int]]:
        if manifest.agent == agent_id:
            yield from ((digest, depth) for digest in earlier_states(manifest))

    return earlier


def no_history(_manifest: Manifest, _depth: int) -> Iterable[tuple[str, int]]:
    """Follow nothing."""
    return ()


def bounded_history(manifest: Manifest, depth: int) -> Iterator[tuple[str, int]]:
    """Follow `depth` states back, and the one state that each of these resumes.

    History ends at an evicted state: what is before it went with the eviction, unless something else holds it.
    """
    if manifest.resumes and depth >= 0:
        yield manifest.resumes, -1
    if manifest.previous and depth > 0 and manifest.op != EVICT:
        yield manifest.previous, depth - 1


def pass_over_damage(reader: Reader, domain_id: str) -> ReadState:
    """Read states for a walk that continues where one cannot be read."""

    def read(digest: str) -> Manifest | None:
        try:
            return reader.manifest(domain_id, digest)
        except AmemError:
            return None

    return read


class StateWalk:
    """Visits states of one domain, each once however many roots reach it.

    `revisited` collects the digests that a root reached and an earlier one had visited.
    """

    def __init__(self, reader: Reader, domain_id: str, earlier: Earlier, read: ReadState | None = None) -> None:
        """`read` reads a state by its digest. By default it raises DamageError for one that cannot be read."""
        self.revisited: set[str] = set()
        self._reader = reader
        self._domain = domain_id
        self._earlier = earlier
        self._read = read or (lambda digest: reader.manifest(domain_id, digest))
        self._depths: dict[str, int] = {}  # digest → how far it was followed from there

    def visit(self, roots: Iterable[str], depth: int = 0) -> Iterator[Visit]:
        """The states that can be reached from `roots` and were not visited before."""
        roots = set(roots)
        todo = [(digest, depth) for digest in roots]
        while todo:
            digest, depth = todo.pop()
            if digest in self._depths and self._depths[digest] >= depth:
                self.revisited.add(digest)
                continue
            if digest not in roots and not self._reader.has_manifest(self._domain, digest):
                continue
            self._depths[digest] = depth
            manifest = self._read(digest)
            yield Visit(digest, manifest)
            if manifest is not None:
                todo += self._earlier(manifest, depth)


def named_by_object(reader: Reader, domain_id: str, found: StoredObject) -> Iterator[NamedFile]:
    """The files that an object other than a manifest names. Raises DamageError."""
    for kind, row in rows_of_object(found, lambda: reader.read_object(domain_id, found)):
        yield NamedFile(StoredObject(kind, row.sha256), row.bytes)


class StateFiles:
    """The files that states of one domain need. Each page is read once."""

    def __init__(self, reader: Reader, domain_id: str) -> None:
        self._reader = reader
        self._domain = domain_id
        self._inner: dict[StoredObject, tuple[NamedFile, ...]] = {}

    def of(self, manifest: Manifest) -> Iterator[NamedFile]:
        """Every file that a state needs but its manifest. Raises DamageError."""
        for named in named_by(manifest):
            yield named
            if named.object not in self._inner:
                self._inner[named.object] = tuple(named_by_object(self._reader, self._domain, named.object))
            yield from self._inner[named.object]


class Holders:
    """Who needs each object of one domain, for an erasure and for `inspect`."""

    def __init__(self, reader: Reader, domain_id: str) -> None:
        self.of: dict[StoredObject, set[str]] = defaultdict(set)
        self._reader = reader
        self._domain = domain_id
        self._files = StateFiles(reader, domain_id)

    def add(self, holder: str, earlier: Earlier, roots: Iterable[str], *, lenient: bool = False) -> None:
        """Note what `roots`, and the states that `earlier` follows from them, need.

        Raises DamageError for a missing root and for what cannot be read; `lenient` passes over them.
        """
        read = pass_over_damage(self._reader, self._domain) if lenient else None
        for digest, manifest in StateWalk(self._reader, self._domain, earlier, read).visit(roots):
            self.of[StoredObject(MANIFEST, digest)].add(holder)
            if manifest is None:
                continue
            try:
                needed = list(self._files.of(manifest))
            except AmemError:
                if not lenient:
                    raise
                continue
            for named in needed:
                self.of[named.object].add(holder)


Wanted = Mapping[str, Container[StoredObject]]


def affected_agents(reader: Reader, wanted: Wanted) -> dict[tuple[str, StoredObject], set[str]]:
    """The agents that need objects of `wanted` (by domain) now: refs are read again, all kept history is followed.

    Unreachable objects have no entry. A file that was seen missing before this call and that has none is no damage:
    gc and erasures delete a manifest before what it names, so they have deleted the file.
    """
    found: dict[tuple[str, StoredObject], set[str]] = defaultdict(set)
    for root in readable_roots(reader.layout):
        if root.domain in wanted:
            for needed in _needed(reader, root, wanted[root.domain]):
                found[root.domain, needed].add(root.agent)
    return found


def _needed(reader: Reader, root: Root, wanted: Container[StoredObject]) -> Iterator[StoredObject]:
    """Members of `wanted` reachable from `root`; unreadable states and pages are skipped."""
    read = pass_over_damage(reader, root.domain)
    seen: set[StoredObject] = set()
    for digest, manifest in StateWalk(reader, root.domain, own_history(root.agent_id), read).visit([root.manifest]):
        own = StoredObject(MANIFEST, digest)
        named = [own, *(named.object for named in named_by(manifest))] if manifest else [own]
        for found in named:
            if found not in seen:
                seen.add(found)
                yield from (each for each in (found, *_inner(reader, root.domain, found)) if each in wanted)


def _inner(reader: Reader, domain_id: str, found: StoredObject) -> list[StoredObject]:
    """The objects that an object names; none where it cannot be read."""
    try:
        return [named.object for named in named_by_object(reader, domain_id, found)]
    except AmemError:
        return []
