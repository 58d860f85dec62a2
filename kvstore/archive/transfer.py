"""An agent out of a store into an archive, and into a store again.

Export reads what one state needs, or with `lineage` the agent's whole kept history and its snapshots. Import checks
every byte, and then stores each file as a turn would: in the archive's own domain this gives the very same files,
which are shared with what is there; in another domain headers, keys and salts are written anew, and the codes stay.
The imported state becomes the one before a new head, and the agent appears with that one commit.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from kvstore.archive.tar import Archive, ArchivedSnapshot, Contents, pieces, size_of_archive
from kvstore.archive.unpack import Arrival
from kvstore.commit.staging import Staging
from kvstore.commit.transaction import Transaction
from kvstore.disk import files
from kvstore.disk.clock import timestamp
from kvstore.errors import AmemError, ConflictError
from kvstore.format.block import damaged
from kvstore.format.manifest import Manifest
from kvstore.format.records import Domain, SnapshotRef
from kvstore.graph.objects import KINDS, StoredObject, size_of
from kvstore.graph.walk import Reach
from kvstore.naming import Ref, check_name, new_id
from kvstore.remove.certificate import is_erased
from kvstore.store import Store


@dataclass(frozen=True)
class Export:
    """An archive: its listing, its size in bytes, and its bytes, to be taken once."""

    contents: Contents
    size: int
    pieces: Iterator[bytes]


@dataclass(frozen=True)
class ImportedAgent:
    """What an import made. `states` counts manifests, the new head left out."""

    agent: str
    agent_id: str
    domain: Domain
    manifest: str
    tokens: int
    states: int
    snapshots: int
    blocks: int
    new_blocks: int
    bytes_written: int


@contextmanager
def exporting(store: Store, ref: Ref, *, lineage: bool = False) -> Iterator[Export]:
    """An archive of one state, or with `lineage` of the states before it too, and of a head's snapshots.

    gc leaves its files alone while the context lasts. Raises NotFoundError, UsageError, DamageError, IsolationError.
    """
    state = store.resolve(ref)
    agent, domain = state.agent, store.domain(state.agent.domain)
    snapshots = [s for s in store.snapshots(agent.name) if lineage and ref.is_head]
    found = _states(store, agent.id, domain.id, [state.digest, *(s.manifest for s in snapshots)], lineage)
    reach = Reach(store, domain.id)
    for digest in found:
        reach.mark(agent.name, "", [digest])  # of no agent: a state leads to nothing but its own files
    objects = [StoredObject("manifests", digest) for digest in found]
    objects += sorted(reach.holders.keys() - set(objects), key=lambda found: (KINDS.index(found.kind), found))
    with _pinned(store, objects):
        contents = Contents(
            agent=agent.name,
            agent_id=agent.id,
            domain=domain,
            head=state.digest,
            snapshots=tuple(ArchivedSnapshot(s.name, s.manifest, s.note, s.created) for s in snapshots),
            files=tuple((o, size_of(store.layout, domain.id, o)) for o in objects),
        )
        yield Export(contents, size_of_archive(contents), pieces(contents, lambda o: _read(store, domain.id, o)))


def _states(store: Store, agent_id: str, domain: str, roots: list[str], lineage: bool) -> list[str]:
    """The states to export, each after those that it goes on from. Another agent's are left out."""
    after: dict[str, set[str]] = {}
    todo: list[str | None] = [*roots]
    while todo:
        digest = todo.pop()
        if digest is None or digest in after or not (digest in roots or store.has_manifest(domain, digest)):
            continue
        manifest = store.manifest(domain, digest)
        if digest in roots or manifest.agent == agent_id:
            earlier = {link for link in (manifest.previous, manifest.resumes) if link} if lineage else set()
            after[digest] = earlier
            todo += earlier
    order = TopologicalSorter({digest: sorted(after[digest] & after.keys()) for digest in sorted(after)})
    return list(order.static_order())


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


def _read(store: Store, domain: str, found: StoredObject) -> bytes:
    path = found.path(store.layout, domain)
    try:
        data = files.read(path)
    except FileNotFoundError as error:
        raise damaged(path, "is missing") from error
    if sha256(data).hexdigest() != found.sha256:
        raise damaged(path, "is altered: its SHA-256 differs")
    return data


def write_file(path: Path, content: Iterator[bytes]) -> None:
    """Write a file outside of the store in one step, over whatever has that name. Raises NoSpaceError."""
    temporary = path.with_name(f"{path.name}.{new_id()}.part")
    files.write_pieces(temporary, content)
    try:
        files.replace(temporary, path)
    except BaseException:
        files.unlink(temporary)
        raise
    files.sync_dir(path.parent)


def import_agent(
    store: Store,
    stream: BinaryIO,
    name: str | None = None,
    *,
    domain: str | None = None,
    as_new: bool = False,
    wait: float = 0.0,
) -> ImportedAgent:
    """Read an archive into the store as the agent `name`, by default under its own name.

    It keeps its id, unless `as_new`, and its domain, unless `domain` names another. Nothing is linked in before the
    last byte is checked. Raises DamageError for an archive that is cut short, altered or malformed, ConflictError
    where the agent's name or id is taken or was erased, IsolationError, UsageError, BusyError, NoSpaceError.
    """
    archive = Archive(stream)
    contents = archive.contents
    name = check_name("agent", name or contents.agent)
    _check_not_erased(store, contents, domain)
    with store.hold(name, wait) as hold:
        if hold.agent:
            raise ConflictError(f"there is an agent {name}", "give another name behind the file")
        _check_id(store, contents, as_new)
        home = store.create_domain(domain) if domain is not None else store.adopt_domain(contents.domain)
        agent_id = new_id() if as_new else contents.agent_id
        with store.transaction(home) as txn:
            arrival = Arrival(archive, txn, agent_id)
            states = arrival.store()
            head = states[contents.head]
            manifest = _head(head, arrival.manifests[head])
            snapshots = _snapshots(name, agent_id, home, contents, states)
            digest = txn.commit(hold, manifest, None, None, snapshots)
            return _imported(name, manifest, digest, home, txn, arrival, len(snapshots))


def _check_not_erased(store: Store, contents: Contents, domain: str | None) -> None:
    if is_erased(store.layout, contents.agent_id, "" if domain is not None else contents.domain.id):
        raise ConflictError(f"agent {contents.agent_id} was erased from this store", "what was erased does not return")


def _check_id(store: Store, contents: Contents, as_new: bool) -> None:
    for agent in store.agents():
        if agent.id == contents.agent_id and not as_new:
            raise ConflictError(f"that agent is here already, as {agent.name}", "--as-new gives it an id of its own")


def _head(state: str, manifest: Manifest) -> Manifest:
    """A head that takes over the imported state, and follows it unless that one is not complete."""
    previous = state if manifest.complete else manifest.previous
    return replace(manifest, op="import", previous=previous, resumes=state, created=timestamp())


def _snapshots(
    name: str, agent_id: str, domain: Domain, contents: Contents, states: dict[str, str]
) -> list[SnapshotRef]:
    return [
        SnapshotRef(name, made.name, agent_id, domain.id, states[made.manifest], made.note, made.created)
        for made in contents.snapshots
    ]


def _imported(
    name: str, head: Manifest, digest: str, domain: Domain, txn: Transaction, arrival: Arrival, snapshots: int
) -> ImportedAgent:
    return ImportedAgent(
        agent=name,
        agent_id=head.agent,
        domain=domain,
        manifest=digest,
        tokens=head.tokens,
        states=len(arrival.manifests),
        snapshots=snapshots,
        blocks=arrival.blocks,
        new_blocks=txn.new_blocks,
        bytes_written=txn.bytes_written,
    )
