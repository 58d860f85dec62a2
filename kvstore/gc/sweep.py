"""Sweep: delete garbage in batches under the exclusive store lock.

Writers commit between two batches. So each batch first checks which refs have changed and what transactions have
pinned, and spares what is reachable from these. A manifest is deleted before what it names, and its folder is flushed
before that: a state that can be found is whole, after a crash too.
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
from kvstore.format.kinds import BLOCK, MANIFEST, OBJECT_KINDS, StoredObject
from kvstore.gc.mark import Marker
from kvstore.gc.plan import GCPlan, ref_signatures
from kvstore.graph.objects import list_domain
from kvstore.graph.roots import has_agent, read_root, ref_paths
from kvstore.store import Store

BATCH = 256  # files that are unlinked while writers wait
Located = tuple[str, StoredObject]  # with the id of its domain


class Sweep:
    """Deletes the garbage of a plan, and spares what writers have begun to use since."""

    def __init__(self, store: Store, plan: GCPlan, history: int) -> None:
        self.deleted: set[Located] = set()
        self.pinned: set[Located] = set()
        self.failed: dict[Path, str] = {}  # → why
        self.removed: dict[Path, int] = {}  # domains, dead writers, orphans → their bytes without objects
        self._store = store
        self._layout = store.layout
        self._plan = plan
        self._signatures = plan.signatures
        self._history = history
        self._live = {root.domain for root in plan.roots}

    def run(self) -> None:
        """Delete. Raises DamageError where something reachable from a changed ref is damaged."""
        for kind in OBJECT_KINDS:
            queue = iter([(d, o) for d, objects in self._plan.garbage.items() for o in objects if o.kind is kind])
            while batch := list(islice(queue, BATCH)):
                with exclusive_store_lock(self._layout, self._store.actor):
                    self._spare_what_changed()
                    self._unlink(batch)
        Index(self._layout).prune({(d, found.sha256) for d, found in self.deleted if found.kind is BLOCK})
        self._remove_orphans()
        self._remove_dead_writers()
        self._remove_domains()

    def _spare_what_changed(self) -> None:
        if pins := live_pins(self._layout):
            self._live |= pins
            for domain_id, objects in self._plan.garbage.items():
                pinned = [found for found in objects if found.sha256 in pins]
                self._spare(domain_id, pinned)
                self.pinned.update((domain_id, found) for found in pinned)
        now = ref_signatures(ref_paths(self._layout))
        changed = [path for path, signature in now.items() if self._signatures.get(path) != signature]
        for root in [root for path in changed if (root := read_root(self._layout, path))]:
            if root.path not in self._plan.orphans or has_agent(self._layout, root):
                self._live.add(root.domain)
                self._spare_state(root.domain, root.manifest, self._history)
                self._signatures[root.path] = now[root.path]

    def _spare_state(self, domain_id: str, manifest: str, history: int) -> None:
        marker = Marker(self._store, domain_id)
        marker.mark(0, manifest, history)
        self._spare(domain_id, marker.owners)

    def _spare(self, domain_id: str, objects: Iterable[StoredObject]) -> None:
        garbage = self._plan.garbage.get(domain_id, {})
        for found in garbage.keys() & set(objects):
            self._plan.kept_objects += 1
            self._plan.kept_bytes += garbage.pop(found)

    def _unlink(self, batch: list[Located]) -> None:
        folders: set[Path] = set()
        for domain_id, found in batch:
            if found not in self._plan.garbage[domain_id]:
                continue
            path = self._layout.object(domain_id, *found)
            with self._failures(path):
                files.unlink(path)
                self.deleted.add((domain_id, found))
                folders.add(path.parent)
            if path in self.failed and found.kind is MANIFEST:
                self._spare_named(domain_id, found)
        for folder in sorted(folders):
            with self._failures(folder):
                self._settle(folder, flush=batch[0][1].kind.is_document)

    def _spare_named(self, domain_id: str, manifest: StoredObject) -> None:
        """Keep the files of a manifest that could not be deleted: it can still be resolved as an earlier state."""
        marker = Marker(self._store, domain_id)
        with suppress(AmemError):
            marker.mark(0, manifest.sha256, history=0)
        self._spare(domain_id, marker.owners.keys() - {manifest})

    def _settle(self, folder: Path, flush: bool) -> None:
        if not any(folder.iterdir()):
            files.remove_folder(folder)
            folder = folder.parent
        if flush:
            files.sync_dir(folder)

    def _remove_orphans(self) -> None:
        """The journal line of their agent's removal covers them too."""
        if not self._plan.orphans:
            return
        with exclusive_store_lock(self._layout, self._store.actor), refs.moving(self._layout, self._store.actor):
            for path in self._plan.orphans:
                with self._failures(path):
                    root = read_root(self._layout, path)
                    if root and not has_agent(self._layout, root):
                        size = path.lstat().st_size
                        files.unlink(path)
                        self.removed[path] = size
                        self._settle(path.parent, flush=True)

    def _remove_dead_writers(self) -> None:
        for folder, size in self._plan.dead_writers.items():
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
        """Remove the domains that no ref and no transaction needs, unless something could not be deleted in them."""
        empty = [domain_id for domain_id in self._plan.garbage if domain_id not in self._live]
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
        """The domain's own file first: a commit that finds it expects the folders as well."""
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
