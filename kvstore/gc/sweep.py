"""Unlinking what nobody leads to, in batches under the exclusive store lock.

Between two batches writers commit. So each batch first looks which refs have changed and what transactions have
pinned, and spares what these lead to. A manifest goes before what it names, and is flushed out of its folder before
that: a state that can be found at all is whole, also after a crash.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path

from kvstore.commit import refs
from kvstore.commit.index import Index
from kvstore.commit.staging import exclusive_store_lock, live_pins
from kvstore.disk import files
from kvstore.disk.locks import INTERNAL_WAIT, Lock, lock_folder
from kvstore.errors import AmemError
from kvstore.gc.mark import Marks
from kvstore.gc.survey import Survey, ref_signatures
from kvstore.graph.objects import KINDS, StoredObject, list_domain
from kvstore.graph.roots import has_agent, read_root, ref_paths
from kvstore.store import Store

BATCH = 256  # files that are unlinked while writers wait
Located = tuple[str, StoredObject]  # with the id of its domain


class Sweep:
    """Deletes what a survey found to be garbage, and spares what writers have taken up since."""

    def __init__(self, store: Store, seen: Survey, history: int) -> None:
        self.deleted: set[Located] = set()
        self.pinned: set[Located] = set()
        self.failed: dict[Path, str] = {}  # → why
        self.removed: dict[Path, int] = {}  # domains, dead writers, orphans → their bytes but for objects
        self._store = store
        self._layout = store.layout
        self._seen = seen
        self._signatures = seen.signatures
        self._history = history
        self._live = {root.domain for root in seen.roots}

    def run(self) -> None:
        """Delete. Ends with DamageError where a ref that has changed meanwhile leads to something damaged."""
        for kind in KINDS:
            queue = iter([(d, o) for d, objects in self._seen.doomed.items() for o in objects if o.kind == kind])
            while batch := list(islice(queue, BATCH)):
                with exclusive_store_lock(self._layout, self._store.actor):
                    self._spare_what_changed()
                    self._unlink(batch)
        Index(self._layout).prune({(d, found.sha256) for d, found in self.deleted if found.kind == "blocks"})
        self._remove_orphans()
        self._remove_dead_writers()
        self._remove_domains()

    def _spare_what_changed(self) -> None:
        if pins := live_pins(self._layout):
            self._live |= pins
            for domain_id, objects in self._seen.doomed.items():
                pinned = [found for found in objects if found.sha256 in pins]
                self._spare(domain_id, pinned)
                self.pinned.update((domain_id, found) for found in pinned)
        now = ref_signatures(ref_paths(self._layout))
        changed = [path for path, signature in now.items() if self._signatures.get(path) != signature]
        for root in [root for path in changed if (root := read_root(self._layout, path))]:
            if root.path not in self._seen.orphans or has_agent(self._layout, root):
                self._live.add(root.domain)
                self._spare_state(root.domain, root.manifest, self._history)
                self._signatures[root.path] = now[root.path]

    def _spare_state(self, domain_id: str, manifest: str, history: int) -> None:
        marks = Marks(self._store, domain_id)
        marks.add(0, manifest, history)
        self._spare(domain_id, marks.owners)

    def _spare(self, domain_id: str, objects: Iterable[StoredObject]) -> None:
        doomed = self._seen.doomed.get(domain_id, {})
        for found in doomed.keys() & set(objects):
            self._seen.kept_objects += 1
            self._seen.kept_bytes += doomed.pop(found)

    def _unlink(self, batch: list[Located]) -> None:
        folders: set[Path] = set()
        for domain_id, found in batch:
            if found not in self._seen.doomed[domain_id]:
                continue
            path = found.path(self._layout, domain_id)
            with self._failures(path):
                files.unlink(path)
                self.deleted.add((domain_id, found))
                folders.add(path.parent)
            if path in self.failed and found.kind == "manifests":
                self._spare_named(domain_id, found)
        for folder in sorted(folders):
            with self._failures(folder):
                self._settle(folder, flush=batch[0][1].kind in ("manifests", "pages"))

    def _spare_named(self, domain_id: str, manifest: StoredObject) -> None:
        """Keep what a manifest that could not be unlinked names: it may still be asked for as an earlier state."""
        marks = Marks(self._store, domain_id)
        with suppress(AmemError):
            marks.add(0, manifest.sha256, history=0)
        self._spare(domain_id, marks.owners.keys() - {manifest})

    def _settle(self, folder: Path, flush: bool) -> None:
        if not any(folder.iterdir()):
            files.remove_folder(folder)
            folder = folder.parent
        if flush:
            files.sync_dir(folder)

    def _remove_orphans(self) -> None:
        """The line of their agent's removal stands in the journal, and is theirs too."""
        if not self._seen.orphans:
            return
        with exclusive_store_lock(self._layout, self._store.actor), refs.moving(self._layout, self._store.actor):
            for path in self._seen.orphans:
                with self._failures(path):
                    root = read_root(self._layout, path)
                    if root and not has_agent(self._layout, root):
                        size = path.lstat().st_size
                        files.unlink(path)
                        self.removed[path] = size
                        self._settle(path.parent, flush=True)

    def _remove_dead_writers(self) -> None:
        for folder, size in self._seen.dead_writers.items():
            with exclusive_store_lock(self._layout, self._store.actor), self._failures(folder):
                descriptor = lock_folder(folder)
                if descriptor is None:  # another writer has removed it
                    continue
                try:
                    files.remove_folder(folder)
                    self.removed[folder] = size
                finally:
                    os.close(descriptor)

    def _remove_domains(self) -> None:
        """Remove the domains that no ref and no transaction needs, unless something could not be deleted there."""
        empty = [domain_id for domain_id in self._seen.doomed if domain_id not in self._live]
        if not empty:
            return
        domains = Lock(self._layout.lock("domains"), "the list of domains", self._store.actor.via)
        with exclusive_store_lock(self._layout, self._store.actor), domains.acquire(False, INTERNAL_WAIT):
            self._spare_what_changed()
            for domain_id in empty:
                if domain_id not in self._live and not any(list_domain(self._layout, domain_id)):
                    with self._failures(self._layout.domain(domain_id)):
                        self._remove_domain(domain_id)

    def _remove_domain(self, domain_id: str) -> None:
        """domain.json first: a commit that finds it expects the folders as well."""
        path, folder = self._layout.domain_file(domain_id), self._layout.domain(domain_id)
        size = path.lstat().st_size if path.exists() else 0
        files.unlink(path)
        for inner in [*sorted(folder.glob("*/*")), *sorted(folder.glob("*")), folder]:
            files.remove_folder(inner)
        self.removed[folder] = size

    @contextmanager
    def _failures(self, path: Path) -> Iterator[None]:
        try:
            yield
        except AmemError as error:
            self.failed[path] = error.message
