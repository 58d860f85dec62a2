"""gc: delete what no ref reaches, and evict agents that were not used for long.

Mark from every agent, snapshot and kept state before them (mark.py), list what is on disk (plan.py), and delete the
rest under the exclusive store lock (sweep.py). Nothing is deleted unless everything that must stay is present. It
needs no index and no free space: on a full disk the ballast is deleted first, and made again at the end.

An eviction commits a state without blocks (evict.py), and the next round deletes what has become garbage. A file that
two heads share goes only with the later one. So heads are marked in the order in which they would stay, and what a
head marks first is what its eviction frees.
"""

import os
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from kvstore.commit import refs
from kvstore.commit.journal import Change
from kvstore.commit.staging import shared_store_lock
from kvstore.disk import files
from kvstore.disk.locks import INTERNAL_WAIT, Lock
from kvstore.errors import AmemError, NoSpaceError
from kvstore.format.kinds import kind_named
from kvstore.gc.evict import evict, evicted_bytes, is_evictable
from kvstore.gc.plan import GCPlan, plan_gc
from kvstore.gc.report import Collected, FormerOwners, report_eviction, report_foreign, report_garbage
from kvstore.gc.sweep import Sweep
from kvstore.graph.roots import Root
from kvstore.store import BALLAST, Store

KEEP_HISTORY = 10


@dataclass(frozen=True)
class Policy:
    """What to keep: states of an agent before its head, bytes of all objects together, seconds without use."""

    keep_history: int = KEEP_HISTORY
    max_bytes: int | None = None
    older_than: float | None = None


@dataclass(frozen=True)
class GCResult:
    """What gc did, or (`dry_run`) would do. Objects are blocks, tails, pages and manifests."""

    collected: tuple[Collected, ...]
    freed_bytes: int
    freed_objects: int
    kept_bytes: int
    kept_objects: int
    over_limit: int  # bytes beyond `max_bytes` that cannot be evicted: of snapshots, busy agents, and tokens
    dry_run: bool
    journaled: bool = False  # False where nothing went, or the disk had no space for the line

    @property
    def evicted(self) -> tuple[str, ...]:
        return tuple(found.name for found in self.collected if found.action == "evicted")

    @property
    def failed(self) -> tuple[Collected, ...]:
        return tuple(found for found in self.collected if found.action == "failed")

    @property
    def complete(self) -> bool:
        """Whether everything was deleted and evicted as asked."""
        return not self.over_limit and not self.failed


def collect(store: Store, policy: Policy, dry_run: bool = False) -> GCResult:
    """Delete garbage, and evict as `policy` says. A dry run takes no lock and writes nothing.

    Raises DamageError, and deletes nothing, where something that must stay is missing; BusyError beside another gc.
    """
    if dry_run:
        return _plan(store, policy)
    lock = Lock(store.layout.lock("gc"), "garbage collection", store.actor.via)
    with _ballast(store), lock.acquire(shared=False, wait=INTERNAL_WAIT):
        return _collect(store, policy)


def _plan(store: Store, policy: Policy) -> GCResult:
    plan = plan_gc(store, policy.keep_history)
    chosen = _choose(store, policy, plan, frozenset())
    collected = [report_eviction(plan, root) for root in chosen]
    if chosen:
        plan = plan_gc(store, policy.keep_history, given_up=frozenset(chosen))
        plan.kept_bytes += sum(evicted_bytes(store, root) for root in chosen)
    owners = FormerOwners(store, plan, {root.agent_id for root in chosen})
    return _result(store, policy, plan, [*collected, *report_garbage(store.layout, plan, owners, None)], dry_run=True)


def _collect(store: Store, policy: Policy) -> GCResult:
    """Delete and evict in rounds until nothing is left to evict: what evictions write counts as well."""
    collected: list[Collected] = []
    evicted: set[str] = set()
    busy: set[str] = set()  # agents that are held, or were used a moment ago
    while True:
        plan = plan_gc(store, policy.keep_history, spared=busy)
        chosen = _choose(store, policy, plan, busy)
        owners = FormerOwners(store, plan, evicted)
        sweep = Sweep(store, plan, policy.keep_history)
        sweep.run()
        collected = [found for found in collected if found.action in ("deleted", "evicted")]
        collected += report_garbage(store.layout, plan, owners, sweep)
        gone, found_busy, failed = _evict_all(store, chosen)
        collected += [report_eviction(plan, root) for root in gone]
        evicted |= {root.agent_id for root in gone}
        busy |= found_busy
        if not gone and not found_busy:
            break
    result = _result(store, policy, plan, collected + failed, dry_run=False)
    return replace(result, journaled=_note_in_journal(store, result))


def _choose(store: Store, policy: Policy, plan: GCPlan, busy: Container[str]) -> list[Root]:
    """The heads to evict: those unused for too long, and the least recently used ones until the rest fits."""
    if policy.max_bytes is None and policy.older_than is None:
        return []
    total, gains = plan.kept_bytes, {}
    limit = total if policy.max_bytes is None else policy.max_bytes
    old = {root for root in plan.least_recently_used if _is_unused(root, policy)}
    for root in plan.least_recently_used:
        if (root in old or total > limit) and root.agent_id not in busy and is_evictable(store, root):
            gains[root] = plan.owned[root] - evicted_bytes(store, root)
            total -= gains[root]
    # an eviction that frees nothing is not worth a prefill
    return [root for root in gains if gains[root] > 0 or root in old or plan.held_by[root] & gains.keys()]


def _is_unused(root: Root, policy: Policy) -> bool:
    if policy.older_than is None or root.updated is None:
        return False
    return (datetime.now(UTC) - datetime.fromisoformat(root.updated)).total_seconds() > policy.older_than


def _evict_all(store: Store, chosen: Sequence[Root]) -> tuple[list[Root], set[str], list[Collected]]:
    """The evicted heads, the ids of the busy ones, and the evictions that found no space."""
    gone, busy, failed = [], set(), []
    for root in chosen:
        try:
            if evict(store, root):
                gone.append(root)
            else:
                busy.add(root.agent_id)
        except NoSpaceError as error:
            failed.append(Collected("failed", error.message, "agent", root.agent, (root.agent,), (), 0))
    return gone, busy, failed


def _result(store: Store, policy: Policy, plan: GCPlan, collected: Sequence[Collected], dry_run: bool) -> GCResult:
    deleted = [found for found in collected if found.action == "deleted"]
    left = [found for found in collected if found.action == "failed" and kind_named(found.kind)]
    kept_bytes = plan.kept_bytes + sum(found.bytes for found in left)
    return GCResult(
        collected=(*collected, *report_foreign(store.layout, plan)),
        freed_bytes=sum(found.bytes for found in deleted),
        freed_objects=sum(kind_named(found.kind) is not None for found in deleted),
        kept_bytes=kept_bytes,
        kept_objects=plan.kept_objects + len(left),
        over_limit=0 if policy.max_bytes is None else max(0, kept_bytes - policy.max_bytes),
        dry_run=dry_run,
    )


def _note_in_journal(store: Store, result: GCResult) -> bool:
    """Evictions have lines of their own; this line says what was deleted. A full disk must not fail a finished gc."""
    if not result.freed_bytes:
        return False
    note = f"freed {result.freed_objects} objects, {result.freed_bytes} bytes"
    try:
        with shared_store_lock(store.layout, store.actor), refs.moving(store.layout, store.actor) as journal:
            journal.append(Change(refs.COLLECT, "", "", None, None, note))
    except NoSpaceError:
        return False
    return True


@contextmanager
def _ballast(store: Store) -> Iterator[None]:
    """Delete the ballast on a full disk, and make it again once there is space."""
    path = store.layout.ballast
    disk = os.statvfs(store.layout.root)
    if disk.f_bavail * disk.f_frsize < BALLAST:
        files.unlink(path)
    try:
        yield
    finally:
        if not path.exists():
            with suppress(AmemError):
                files.write_new(path, [os.urandom(BALLAST)])
