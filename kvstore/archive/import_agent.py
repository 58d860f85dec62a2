"""Import: an agent from an archive into a store.

Every byte is checked, and each file is stored as a turn would store it: in the archive's own domain this gives the very
same files, which are shared with existing ones; in another domain headers, keys and salts are written anew, and the
codes stay. The imported state becomes the one before a new head, and the agent appears with that one commit.
"""

from dataclasses import dataclass
from typing import BinaryIO

from kvstore.archive.tar import Archive, Contents
from kvstore.archive.unpack import Unpacking
from kvstore.commit.transaction import Transaction
from kvstore.disk.clock import timestamp
from kvstore.errors import ConflictError
from kvstore.format.document import replace
from kvstore.format.manifest import Manifest
from kvstore.format.records import Domain, SnapshotRef
from kvstore.naming import check_name, new_id
from kvstore.remove.certificate import is_erased
from kvstore.store import Store


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

    It keeps its id, unless `as_new`, and its domain, unless `domain` names another. Nothing is committed before the
    last byte is checked. Raises DamageError for an archive that is cut short, altered or malformed, ConflictError
    where the agent's name or id is taken or was erased, IsolationError, UsageError, BusyError, NoSpaceError.
    """
    archive = Archive(stream)
    contents = archive.contents
    name = check_name("agent", name or contents.agent)
    _check_not_erased(store, contents, domain)
    with store.hold(name, wait) as hold:
        if hold.agent:
            raise ConflictError(f"agent {name} exists already", "give another name after the file")
        _check_id(store, contents, as_new)
        home = store.create_domain(domain) if domain is not None else store.adopt_domain(contents.domain)
        agent_id = new_id() if as_new else contents.agent_id
        with store.transaction(home) as txn:
            unpacking = Unpacking(archive, txn, agent_id)
            states = unpacking.store()
            head = states[contents.head]
            manifest = _head(head, unpacking.manifests[head])
            snapshots = _snapshots(name, agent_id, home, contents, states)
            digest = txn.commit(hold, manifest, None, None, snapshots)
            return _imported(name, manifest, digest, home, txn, unpacking, len(snapshots))


def _check_not_erased(store: Store, contents: Contents, domain: str | None) -> None:
    if is_erased(store.layout, contents.agent_id, "" if domain is not None else contents.domain.id):
        raise ConflictError(
            f"agent {contents.agent_id} was erased from this store", "an erased agent cannot be imported again"
        )


def _check_id(store: Store, contents: Contents, as_new: bool) -> None:
    for agent in store.agents():
        if agent.id == contents.agent_id and not as_new:
            raise ConflictError(f"this agent exists already, as {agent.name}", "--as-new gives it an id of its own")


def _head(state: str, manifest: Manifest) -> Manifest:
    """A head that resumes the imported state. It follows that state, unless it is incomplete."""
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
    name: str, head: Manifest, digest: str, domain: Domain, txn: Transaction, unpacking: Unpacking, snapshots: int
) -> ImportedAgent:
    return ImportedAgent(
        agent=name,
        agent_id=head.agent,
        domain=domain,
        manifest=digest,
        tokens=head.tokens,
        states=len(unpacking.manifests),
        snapshots=snapshots,
        blocks=unpacking.blocks,
        new_blocks=txn.new_blocks,
        bytes_written=txn.bytes_written,
    )
