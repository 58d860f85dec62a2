"""What stands in a store, domain by domain: what refs lead to, what nobody leads to, and what does not belong there.

Only what nobody leads to is kept in memory, with the marks of one domain at a time.
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
from kvstore.format.layout import StoreLayout
from kvstore.gc.mark import Marked, Marks
from kvstore.graph.objects import StoredObject, list_domain, strangers
from kvstore.graph.roots import Root, find_orphans, read_root, ref_paths
from kvstore.graph.walk import whose
from kvstore.reader import Reader

Doomed = dict[str, dict[StoredObject, int]]  # by domain: what nobody leads to → its bytes


@dataclass
class Survey:
    """One look at a store."""

    roots: list[Root]
    signatures: dict[Path, tuple[int, int]]  # of the files of refs, taken before they were read
    orphans: list[Path] = field(default_factory=list)  # snapshots' refs whose agent has gone
    doomed: Doomed = field(default_factory=dict)
    kept_objects: int = 0
    kept_bytes: int = 0
    owned: dict[Root, int] = field(default_factory=dict)  # bytes that only this head holds, of those used less lately
    held_by: dict[Root, frozenset[Root]] = field(default_factory=dict)  # who holds the rest of what this head needs
    foreign: list[Path] = field(default_factory=list)
    dead_writers: dict[Path, int] = field(default_factory=dict)  # staging folders → bytes

    def removable(self, layout: StoreLayout) -> dict[Path, int]:
        """The domains, dead writers and orphans that would go, and their bytes but for objects."""
        live = {root.domain for root in self.roots} | live_pins(layout)
        strange = {parent for path in self.foreign for parent in path.parents}
        empty = [layout.domain(d) for d in self.doomed if d not in live and layout.domain(d) not in strange]
        orphans = {path: path.lstat().st_size for path in self.orphans}
        return orphans | self.dead_writers | {folder: folder_bytes(folder) for folder in empty}

    @property
    def used_least_lately(self) -> list[Root]:
        """Agents' heads, the one whose last use is longest ago first."""
        return sorted((root for root in self.roots if root.updated), key=lambda root: root.updated or "")


def ref_signatures(layout_paths: Iterable[Path]) -> dict[Path, tuple[int, int]]:
    """What changes whenever a ref is replaced: its inode and its time."""
    signatures = {}
    for path in layout_paths:
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            continue
        signatures[path] = (status.st_ino, status.st_mtime_ns)
    return signatures


def survey(
    reader: Reader, history: int, spared: Container[str] = frozenset(), given_up: Container[Root] = frozenset()
) -> Survey:
    """Mark from all refs but those `given_up`, each `history` states back, and list what is there.

    What several heads need counts for the one that was used last; snapshots and the agents `spared` come before all.
    Raises DamageError, naming what and whose, where something that must stay is missing or cannot be read.
    """
    paths = ref_paths(reader.layout)
    signatures = ref_signatures(paths)
    roots = [root for path in paths if (root := read_root(reader.layout, path))]
    orphans = find_orphans(reader.layout, roots)
    roots = [root for root in roots if root not in orphans]
    for orphan in orphans:  # an import brings snapshots before their agent, so they are looked at again under the lock
        signatures.pop(orphan.path, None)
    seen = Survey(roots, signatures, sorted(orphan.path for orphan in orphans))
    by_domain: dict[str, list[Root]] = defaultdict(list)
    for root in sorted(roots, key=lambda root: _rank(root, spared), reverse=True):
        by_domain[root.domain].append(root)
    folders = {path.name for path in reader.layout.domains.iterdir() if path.is_dir() and not path.is_symlink()}
    for domain_id in sorted(folders | by_domain.keys()):
        _survey_domain(reader, seen, domain_id, [r for r in by_domain[domain_id] if r not in given_up], history)
    _survey_rest(reader, seen)
    return seen


def _rank(root: Root, spared: Container[str]) -> tuple[bool, str]:
    return root.snapshot is not None or root.agent_id in spared, root.updated or ""


def _survey_domain(reader: Reader, seen: Survey, domain_id: str, roots: Sequence[Root], history: int) -> None:
    marks = Marks(reader, domain_id)
    for number, root in enumerate(roots):
        marked = _mark(reader, marks, number, root, history)
        if marked and root.snapshot is None:
            seen.owned[root] = marked.bytes
            seen.held_by[root] = frozenset(roots[other] for other in marked.shared_with)
    doomed: dict[StoredObject, int] = {}
    there: set[StoredObject] = set()
    for found, entry in list_domain(reader.layout, domain_id):
        if found is None:
            seen.foreign.append(Path(entry.path))
        elif found in marks.owners:
            there.add(found)
        else:
            doomed[found] = entry.stat(follow_symlinks=False).st_size
    _check_whole(reader, domain_id, marks.owners.keys() - there)
    seen.doomed[domain_id] = doomed
    seen.kept_objects += len(marks.owners)
    seen.kept_bytes += marks.bytes


def _mark(reader: Reader, marks: Marks, number: int, root: Root, history: int) -> Marked | None:
    try:
        return marks.add(number, root.manifest, history)
    except DamageError as damage:
        if (
            read_root(reader.layout, root.path) != root
        ):  # moved on, or removed: its new state is marked as a changed ref
            return None
        raise DamageError(
            f"{damage.message}; {root} needs it, and nothing was deleted", _advice([root.agent])
        ) from damage


def _check_whole(reader: Reader, domain_id: str, missing: set[StoredObject]) -> None:
    """Raises DamageError where something is missing that an agent needs."""
    if not missing:
        return
    hurt = whose(reader, {domain_id: missing})
    for (_, found), agents in sorted(hurt.items()):
        names = ", ".join(sorted(agents))
        more = f", and {len(hurt) - 1} more files" if len(hurt) > 1 else ""
        raise DamageError(
            f"{found}{more} is missing; {names} needs it, and nothing was deleted", _advice(sorted(agents))
        )


def _advice(agents: Sequence[str]) -> str:
    return f"`amem verify` tells all; then `amem repair {' '.join(agents)}`, or `amem rm` what you do not need"


def _survey_rest(reader: Reader, seen: Survey) -> None:
    """What stands outside of the domains: strangers, and what dead writers left."""
    seen.foreign += strangers(reader.layout)
    for folder in reader.layout.staging.iterdir():
        descriptor = lock_folder(folder)
        if descriptor is not None:
            os.close(descriptor)
            with suppress(FileNotFoundError):  # the next writer was faster
                seen.dead_writers[folder] = folder_bytes(folder)


def folder_bytes(folder: Path) -> int:
    """Bytes of the files that stand in a folder itself."""
    with os.scandir(folder) as entries:
        return sum(e.stat(follow_symlinks=False).st_size for e in entries if not e.is_dir(follow_symlinks=False))
