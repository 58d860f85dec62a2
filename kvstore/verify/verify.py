"""verify: read a store and report what is wrong, which agents are affected, and what is proven and what is not.

It takes no lock and writes nothing, so it runs on read-only media and beside writers. It looks a second time for what
is missing, from the refs as they are then: gc deletes a manifest before what it names, so a file that is missing and
that a state still names is damage. It continues after a fault.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from kvstore.commit import refs
from kvstore.disk.clock import timestamp
from kvstore.errors import AmemError, DamageError
from kvstore.format.kinds import StoredObject
from kvstore.format.layout import StoreLayout
from kvstore.format.records import Domain
from kvstore.graph.objects import domain_folders, foreign_files, list_domain, stored_objects
from kvstore.graph.roots import Root, find_orphans, read_root, ref_paths
from kvstore.store import Store
from kvstore.verify import boundaries
from kvstore.verify.checks import Checks, Report
from kvstore.verify.claims import claims
from kvstore.verify.findings import Findings
from kvstore.verify.journal import JournalState, check_journal
from kvstore.verify.states import StateCheck


def verify(store: Store, checks: Checks) -> Report:
    """Check a store. Raises NotFoundError for an agent that does not exist."""
    return _Verification(store, checks).run()


def sums(layout: StoreLayout) -> Iterator[str]:
    """The lines, relative to the store, that `sha256sum -c` takes: one for each block, tail, page and manifest."""
    for domain_id in domain_folders(layout):
        for found in stored_objects(layout, domain_id):
            yield f"{found.sha256}  {layout.object(domain_id, *found).relative_to(layout.root)}\n"


class _Verification:
    def __init__(self, store: Store, checks: Checks) -> None:
        self._store = store
        self._checks = checks
        self._findings = Findings()
        self._once = boundaries.Once(self._findings)
        self._hasher = hashlib.sha256()
        self._checked = 0
        self._bytes = 0
        self._domains: list[Domain] = []
        self._known = frozenset(_ids_and_salts(store.layout))

    def run(self) -> Report:
        started = timestamp()
        layout, checks = self._store.layout, self._checks
        index_read = self._check_files() if checks.depth or checks.isolation else False
        journal = check_journal(layout, checks.journal_head, self._findings) if checks.journal else JournalState()
        findings = self._findings.all(self._store)
        proven, not_proven = claims(checks, findings, index_read)
        return Report(
            findings=tuple(findings),
            checked=self._checked,
            bytes=self._bytes,
            proven=proven,
            not_proven=not_proven,
            store_id=self._store.id,
            started=started,
            finished=timestamp(),
            objects_digest=self._hasher.hexdigest(),
            journal_lines=journal.lines,
            journal_head=journal.digest,
        )

    def _check_files(self) -> bool:
        """All domains and what is beside them. Returns whether the index could be read."""
        layout, whole = self._store.layout, not self._checks.agents
        by_domain: dict[str, list[Root]] = defaultdict(list)
        for root in self._roots():
            by_domain[root.domain].append(root)
        for domain_id in sorted(by_domain.keys() | set(domain_folders(layout) if whole else ())):
            self._check_domain(domain_id, by_domain[domain_id])
        for path in foreign_files(layout) if whole else ():
            self._foreign(path)
        return self._check_boundaries() if whole and self._checks.isolation else False

    def _roots(self) -> list[Root]:
        """The refs to check; a damaged one is a fault of the agent that it is named after."""
        layout, wanted = self._store.layout, {name.lower() for name in self._checks.agents}
        for name in self._checks.agents:
            if not layout.agent_ref(name).exists():
                self._store.agent(name)  # which says what is close to it
        roots = []
        for path in ref_paths(layout):
            agent = path.name if path.parent == layout.agent_refs else path.parent.name
            if wanted and agent not in wanted:
                continue
            try:
                root = read_root(layout, path)
            except AmemError as error:
                what = str(path.relative_to(layout.root))
                self._findings.add("damage", "ref", what, error.message, [agent])
                continue
            if root:
                roots.append(root)
        orphans = find_orphans(layout, roots)
        return [root for root in roots if root not in orphans]

    def _check_domain(self, domain_id: str, roots: Sequence[Root]) -> None:
        present: dict[StoredObject, int] = {}
        if not self._checks.agents:
            for found, entry in list_domain(self._store.layout, domain_id):
                if found is None:
                    self._foreign(Path(entry.path))
                    continue
                try:
                    present[found] = entry.stat(follow_symlinks=False).st_size
                except FileNotFoundError:
                    continue
        domain = self._read_domain(domain_id, roots)
        if domain is None:
            return
        self._domains.append(domain)
        seen = dict(present)
        if self._checks.depth:
            check = StateCheck(self._store, domain, present, self._checks.depth, self._findings)
            for root in roots:
                check.check(root)
            check.check_rest()
            seen = check.seen
        if self._checks.isolation:
            boundaries.check_origin(self._store.layout, domain, self._known, seen, self._findings)
            self._once.check(domain_id, seen)
        self._count(domain_id, seen)

    def _read_domain(self, domain_id: str, roots: Sequence[Root]) -> Domain | None:
        """None where it cannot be read; without refs it is what an erasure has left for gc."""
        agents = {root.agent for root in roots}
        path = f"domains/{domain_id}/domain.json"
        try:
            domain = refs.read_domain(self._store.layout, domain_id)
        except DamageError as error:
            self._findings.add("damage", "domain", path, error.message, agents)
            return None
        if domain is None:
            now = [root for root in roots if read_root(self._store.layout, root.path) == root]
            if now:
                self._findings.add("damage", "missing", path, f"{path} is missing", agents)
        elif domain.id != domain_id:
            self._findings.add("breach", "boundary", path, f"{path} is that of another domain", agents)
        return domain

    def _foreign(self, path: Path) -> None:
        what = str(path.relative_to(self._store.layout.root))
        self._findings.add("damage", "foreign", what, f"{what} does not belong into a store, or is not a regular file")

    def _check_boundaries(self) -> bool:
        layout = self._store.layout
        boundaries.check_salts(self._domains, self._findings)
        boundaries.check_access(layout, self._findings)
        ids = frozenset(domain.id for domain in self._domains)
        boundaries.check_staging(layout, ids, self._findings)
        return boundaries.check_index(layout, ids, self._once, self._findings)

    def _count(self, domain_id: str, seen: dict[StoredObject, int]) -> None:
        for found in sorted(seen):
            self._hasher.update(f"{domain_id}/{found.kind.folder}/{found.sha256}\n".encode())
        self._checked += len(seen)
        self._bytes += sum(seen.values())


def _ids_and_salts(layout: StoreLayout) -> Iterator[str]:
    for domain_id in domain_folders(layout):
        with suppress(AmemError):
            if domain := refs.read_domain(layout, domain_id):
                yield from (domain.id, domain.salt)
