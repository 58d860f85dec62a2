"""Refs and domains: the few files that change, and the only ones that hold names.

A ref names a manifest by its digest. It moves only under the journal lock, after its intent is in the journal.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

from kvstore.commit.journal import Actor, Entry, JournalWriter, writing
from kvstore.disk import files
from kvstore.errors import AmemError, DamageError
from kvstore.format.document import encode, parse, place_of, replace
from kvstore.format.layout import StoreLayout
from kvstore.format.records import AgentRef, Domain, SnapshotRef

SNAPSHOT = "snapshot"  # the op of a snapshot's journal line
REMOVE, ERASE = "rm", "erase"  # of an agent's removal, without its bytes and with them
REMOVE_SNAPSHOT, ERASE_SNAPSHOT = "rm-snapshot", "erase-snapshot"  # their note is the time of the snapshot's line
COLLECT = "gc"  # of what gc has freed; no ref moves
REMOVE_DOMAIN, ERASE_DOMAIN = "rm-domain", "erase-domain"  # the one frees its name, the other destroys it


D = TypeVar("D", Domain, AgentRef, SnapshotRef)


def _read(path: Path, kind: type[D]) -> D | None:
    """The document at `path`; None where no file is. Raises DamageError for anything but its canonical bytes."""
    try:
        data = files.read(path)
    except FileNotFoundError:
        return None
    try:
        document = parse(data, kind)
    except ValueError as error:
        raise _altered(path, place_of(error)) from error
    if encode(document) != data:
        raise _altered(path)
    return document


def _altered(path: Path, place: str = "") -> DamageError:
    return DamageError(f"{path} is altered or cut short{place}", "`amem verify` lists the affected agents")


def _files(folder: Path) -> list[Path]:
    """The refs in a folder, by name; none where the folder is missing."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except FileNotFoundError:
        return []


def _read_all(paths: list[Path], kind: type[D]) -> list[D]:
    return [document for path in paths if (document := _read(path, kind))]


def read_domain(layout: StoreLayout, domain_id: str) -> Domain | None:
    return _read(layout.domain_file(domain_id), Domain)


def read_domains(layout: StoreLayout) -> list[Domain]:
    return _read_all([layout.domain_file(path.name) for path in _files(layout.domains)], Domain)


def read_agent(layout: StoreLayout, name: str) -> AgentRef | None:
    """The agent of that name; names are compared without their case."""
    return _read(layout.agent_ref(name), AgentRef)


def read_agents(layout: StoreLayout) -> list[AgentRef]:
    return _read_all(_files(layout.agent_refs), AgentRef)


def read_snapshot(layout: StoreLayout, agent: str, name: str) -> SnapshotRef | None:
    """The snapshot of that name; names are compared without their case."""
    return _read(layout.snapshot_ref(agent, name), SnapshotRef)


def read_snapshots(layout: StoreLayout, agent: str) -> list[SnapshotRef]:
    return _read_all(_files(layout.snapshot_folder(agent)), SnapshotRef)


def moving(layout: StoreLayout, actor: Actor) -> AbstractContextManager[JournalWriter]:
    """Hold the right to move refs: compare, append the intent, then `put`."""
    return writing(layout, actor, lambda entry: _followed(layout, entry))


def put(layout: StoreLayout, ref: AgentRef | SnapshotRef) -> None:
    """Move a ref, or make it. Only within `moving`."""
    if isinstance(ref, AgentRef):
        path = layout.agent_ref(ref.name)
    else:
        path = layout.snapshot_ref(ref.agent, ref.name)
        files.make_dirs(path.parent)
    files.publish(path, encode(ref), layout.staged_ref)


def remove_agent(layout: StoreLayout, agent: AgentRef) -> None:
    """Remove an agent's ref, which ends the agent, and then its snapshots. Only within `moving`."""
    _remove(layout.agent_ref(agent.name))
    snapshots = layout.snapshot_folder(agent.name)
    if snapshots.is_dir():
        files.remove_folder(snapshots)
        files.sync_dir(snapshots.parent, full=True)


def remove_snapshot(layout: StoreLayout, snapshot: SnapshotRef) -> None:
    """Remove a snapshot. Only within `moving`."""
    _remove(layout.snapshot_ref(snapshot.agent, snapshot.name))


def free_domain_name(layout: StoreLayout, domain: Domain) -> None:
    """Remove a domain's name, so that another domain may have it. Only within `moving`."""
    files.publish(layout.domain_file(domain.id), encode(replace(domain, name=None)), layout.staged_ref)


def remove_domain(layout: StoreLayout, domain_id: str) -> None:
    """Destroy a domain's salt and name; what else is in its folder stays. Only within `moving`."""
    _remove(layout.domain_file(domain_id))


def _remove(path: Path) -> None:
    files.unlink(path)
    if path.parent.is_dir():
        files.sync_dir(path.parent, full=True)


def put_domain(layout: StoreLayout, domain: Domain, temporary: Path) -> None:
    """Write a domain to disk unless it is there: one made for an agent is written with the agent's first commit."""
    path = layout.domain_file(domain.id)
    if not path.is_file():
        for folder in layout.domain_folders(domain.id):
            files.make_dirs(folder)
        files.publish(path, encode(domain), temporary)


def _newest_first(paths: Iterable[Path], kind: type[D]) -> Iterator[D]:
    """The readable documents among `paths`: another agent's damaged ref must not stop this one's commit."""
    for path in sorted(paths, key=lambda path: os.lstat(path).st_mtime_ns, reverse=True):
        try:
            document = _read(path, kind)
        except AmemError:
            continue
        if document:
            yield document


def _followed(layout: StoreLayout, entry: Entry) -> bool:
    """Whether a ref moved as the journal's last entry says. The ref that moved last is looked at first."""
    change = entry.change
    if change.op == COLLECT:
        return True
    if change.op in (REMOVE_DOMAIN, ERASE_DOMAIN):
        domain = read_domain(layout, change.domain_id)
        return domain is None or (change.op == REMOVE_DOMAIN and domain.name is None)
    agents = _newest_first(layout.agent_refs.iterdir(), AgentRef)
    if change.op in (REMOVE, ERASE):
        return all(ref.id != change.agent_id for ref in agents)
    snapshots = _newest_first(layout.snapshot_refs.glob("*/*"), SnapshotRef)
    if change.op in (REMOVE_SNAPSHOT, ERASE_SNAPSHOT):
        return all((ref.agent_id, ref.created) != (change.agent_id, change.note) for ref in snapshots)
    wanted = (change.agent_id, change.after, entry.time)
    if change.op == SNAPSHOT:
        return any((ref.agent_id, ref.manifest, ref.created) == wanted for ref in snapshots)
    return any((ref.id, ref.manifest, ref.updated) == wanted for ref in agents)
