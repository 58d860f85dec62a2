"""Export: an agent from a store into an archive.

Reads what one state needs, or with `lineage` the agent's whole kept history and its snapshots.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

from kvstore.archive.tar import ArchivedSnapshot, Contents, pieces, size_of_archive
from kvstore.commit.staging import Staging
from kvstore.disk import files
from kvstore.errors import AmemError
from kvstore.format.kinds import MANIFEST, OBJECT_KINDS, StoredObject
from kvstore.format.references import earlier_states
from kvstore.graph.objects import size_of
from kvstore.graph.walk import Earlier, StateFiles, StateWalk, no_history, own_history
from kvstore.naming import Ref, new_id
from kvstore.store import Store


@dataclass(frozen=True)
class Export:
    """An archive: its listing, its size in bytes, and its bytes, which can be read once."""

    contents: Contents
    size: int
    pieces: Iterator[bytes]


@contextmanager
def exporting(store: Store, ref: Ref, *, lineage: bool = False) -> Iterator[Export]:
    """An archive of one state, or with `lineage` of the states before it too, and of a head's snapshots.

    gc leaves its files alone while the context lasts. Raises NotFoundError, UsageError, DamageError, IsolationError.
    """
    state = store.resolve(ref)
    agent, domain = state.agent, store.domain(state.agent.domain)
    snapshots = [s for s in store.snapshots(agent.name) if lineage and ref.is_head]
    roots = [state.digest, *(s.manifest for s in snapshots)]
    objects = _objects(store, domain.id, agent.id, roots, own_history(agent.id) if lineage else no_history)
    with _pinned(store, objects):
        contents = Contents(
            agent=agent.name,
            agent_id=agent.id,
            domain=domain,
            head=state.digest,
            snapshots=tuple(ArchivedSnapshot(s.name, s.manifest, s.note, s.created) for s in snapshots),
            files=tuple((found, size_of(store.layout, domain.id, found)) for found in objects),
        )
        read = pieces(contents, lambda found: store.read_object(domain.id, found))
        yield Export(contents, size_of_archive(contents), read)


def _objects(store: Store, domain_id: str, agent_id: str, roots: list[str], earlier: Earlier) -> list[StoredObject]:
    """The objects to export, in the archive's order. States of other agents are left out."""
    after: dict[str, list[str]] = {}
    needed: set[StoredObject] = set()
    files_of = StateFiles(store, domain_id)
    for digest, manifest in StateWalk(store, domain_id, earlier).visit(roots):
        assert manifest is not None  # the walk raises for a state that cannot be read
        if digest in roots or manifest.agent == agent_id:
            after[digest] = earlier_states(manifest)
            needed |= {named.object for named in files_of.of(manifest)}
    # each state after those that it continues
    order = TopologicalSorter({digest: sorted(set(after[digest]) & after.keys()) for digest in sorted(after)})
    states = [StoredObject(MANIFEST, digest) for digest in order.static_order()]
    return states + sorted(needed, key=lambda found: (OBJECT_KINDS.index(found.kind), found.sha256))


@contextmanager
def _pinned(store: Store, objects: list[StoredObject]) -> Iterator[None]:
    """Keep gc from what is being read. A store that cannot be written is not collected either."""
    staging = None
    with suppress(AmemError):
        staging = Staging(store.layout, store.actor)
        staging.pin(found.sha256 for found in objects)
    try:
        yield
    finally:
        if staging:
            staging.close()


def write_file(path: Path, content: Iterator[bytes]) -> None:
    """Write a file outside of the store in one step; an existing one is replaced. Raises NoSpaceError."""
    temporary = path.with_name(f"{path.name}.{new_id()}.part")
    files.write_pieces(temporary, content)
    try:
        files.replace(temporary, path)
    except BaseException:
        files.unlink(temporary)
        raise
    files.sync_dir(path.parent)
