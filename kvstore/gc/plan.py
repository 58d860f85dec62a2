"""Plan a collection: what is reachable in a store, what is garbage, and what does not belong there.

Only garbage is kept in memory, with the marks of one domain at a time.
"""

import os
from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.commit.staging import live_pins
from kvstore.disk.locks import lock_folder
from kvstore.errors import DamageError
from kvstore.format.kinds import StoredObject
from kvstore.format.layout import StoreLayout
from kvstore.gc.mark import Marked, Marker
from kvstore.graph.objects import domain_folders, foreign_files, list_domain
from kvstore.graph.roots import Root, find_orphans, read_root, ref_paths
from kvstore.graph.walk import affected_agents
from kvstore.reader import Reader

Garbage = dict[str, dict[StoredObject, int]]  # by domain: unreachable objects → their bytes


@dataclass
class GCPlan:
    """What one look at a store found."""

    roots: list[Root]
    signatures: dict[Path, tuple[int, int]]  # of the files of refs, taken before they were read
    orphans: list[Path] = field(default_factory=list)  # refs of snapshots whose agent was removed
    garbage: Garbage = field(default_factory=dict)
    kept_objects: int = 0
    kept_bytes: int = 0
    owned: dict[Root, int] = field(default_factory=dict)  # bytes that this head holds and no more recently used one
    held_by: dict[Root, frozenset[Root]] = field(default_factory=dict)  # the roots that hold the rest of a head's files
    foreign: list[Path] = field(default_factory=list)
    dead_writers: dict[Path, int] = field(default_factory=dict)  # staging folders → bytes

    def removable(self, layout: StoreLayout) -> dict[Path, int]:
        """The empty domains, dead writers and orphans, and their bytes without objects."""
        live = {root.domain for root in self.roots} | live_pins(layout)
        foreign_parents = {parent for path in self.foreign for parent in path.parents}
        empty = [layout.domain(d) for d in self.garbage if d not in live and layout.domain(d) not in foreign_parents]
        orphans = {path: path.lstat().st_size for path in self.orphans}
        return orphans | self.dead_writers | {folder: _folder_bytes(folder) for folder in empty}

    @property
    def least_recently_used(self) -> list[Root]:
        """Agents' heads, the one whose last use is longest ago first."""
        return sorted((root for root in self.roots if root.updated), key=lambda root: root.updated or "")


def ref_signatures(paths: Iterable[Path]) -> dict[Path, tuple[int, int]]:
    """What changes whenever a ref is replaced: its inode and its time."""
    signatures = {}
    for path in paths:
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            continue
        signatures[path] = (status.st_ino, status.st_mtime_ns)
    return signatures


def plan_gc(
    reader: Reader, history: int, spared: Container[str] = frozenset(), given_up: Container[Root] = frozenset()
) -> GCPlan:
    """Mark from all refs but those `given_up`, each `history` states back, and list what is on disk.

    What several heads need counts for the one that was used last; snapshots and the agents `spared` come before all.
    Raises DamageError, which names the file and its agents, where a reachable file is missing or cannot be read.
    """
    paths = ref_paths(reader.layout)
    signatures = ref_signatures(paths)
    roots = [root for path in paths if (root := read_root(reader.layout, path))]
    orphans = find_orphans(reader.layout, roots)
    roots = [root for root in roots if root not in orphans]
    for orphan in orphans:  # an import brings snapshots before their agent, so they are looked at again under the lock
        signatures.pop(orphan.path, None)
    plan = GCPlan(roots, signatures, sorted(orphan.path for orphan in orphans))
    by_domain: dict[str, list[Root]] = defaultdict(list)
    for root in sorted(roots, key=lambda root: _rank(root, spared), reverse=True):
        by_domain[root.domain].append(root)
    for domain_id in sorted({*domain_folders(reader.layout), *by_domain}):
        _plan_domain(reader, plan, domain_id, [r for r in by_domain[domain_id] if r not in given_up], history)
    plan.foreign += foreign_files(reader.layout)
    plan.dead_writers = _dead_writers(reader.layout)
    return plan


def _rank(root: Root, spared: Container[str]) -> tuple[bool, str]:
    return root.snapshot is not None or root.agent_id in spared, root.updated or ""


def _plan_domain(reader: Reader, plan: GCPlan, domain_id: str, roots: Sequence[Root], history: int) -> None:
    marker = Marker(reader, domain_id)
    for number, root in enumerate(roots):
        marked = _mark(reader, marker, number, root, history)
        if marked and root.snapshot is None:
            plan.owned[root] = marked.bytes
            plan.held_by[root] = frozenset(roots[other] for other in marked.shared_with)
    garbage: dict[StoredObject, int] = {}
    present: set[StoredObject] = set()
    for found, entry in list_domain(reader.layout, domain_id):
        if found is None:
            plan.foreign.append(Path(entry.path))
        elif found in marker.owners:
            present.add(found)
        else:
            garbage[found] = entry.stat(follow_symlinks=False).st_size
    _check_whole(reader, domain_id, marker.owners.keys() - present)
    plan.garbage[domain_id] = garbage
    plan.kept_objects += len(marker.owners)
    plan.kept_bytes += marker.bytes


def _mark(reader: Reader, marker: Marker, number: int, root: Root, history: int) -> Marked | None:
    try:
        return marker.mark(number, root.manifest, history)
    except DamageError as damage:
        if read_root(reader.layout, root.path) != root:
            return None  # moved on, or removed: its new state is marked as a changed ref
        raise DamageError(
            f"{damage.message}; {root} needs it, and nothing was deleted", _advice([root.agent])
        ) from damage


def _check_whole(reader: Reader, domain_id: str, missing: set[StoredObject]) -> None:
    """Raises DamageError where an object is missing that an agent needs."""
    if not missing:
        return
    affected = affected_agents(reader, {domain_id: missing})
    for (_, found), agents in sorted(affected.items()):
        names = ", ".join(sorted(agents))
        more = f", and {len(affected) - 1} more files" if len(affected) > 1 else ""
        raise DamageError(
            f"{found}{more} is missing; {names} needs it, and nothing was deleted", _advice(sorted(agents))
        )


def _advice(agents: Sequence[str]) -> str:
    return (
        f"see all damage with `amem verify`; then `amem repair {' '.join(agents)}`, or `amem rm` what you do not need"
    )


def _dead_writers(layout: StoreLayout) -> dict[Path, int]:
    """The staging folders that no process holds, and their bytes."""
    found = {}
    for folder in layout.staging.iterdir():
        descriptor = lock_folder(folder)
        if descriptor is not None:
            os.close(descriptor)
            with suppress(FileNotFoundError):  # the next writer was faster
                found[folder] = _folder_bytes(folder)
    return found


def _folder_bytes(folder: Path) -> int:
    """Bytes of the files in a folder, without those in its subfolders."""
    with os.scandir(folder) as entries:
        return sum(e.stat(follow_symlinks=False).st_size for e in entries if not e.is_dir(follow_symlinks=False))
