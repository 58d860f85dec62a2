"""Remove agents, snapshots and domains: the refs, and with `erase` the bytes at once.

An erasure deletes every object of the domain that the remaining refs do not reach. Blocks that forks still need stay,
and the result names who holds them; unreachable states, as of a prefill that was cut short, are deleted too. It runs
under the exclusive store lock, so that no fork, snapshot or commit can start from what is being deleted. The journal
is written first, then the refs are removed, then the files, a manifest before what it names: a crash leaves at most
unreachable files, which gc or the same erasure of the domain deletes. With the last agent of a domain its salt is
deleted too, and with it the last way to test a digest against a guessed text.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from kvstore.commit import refs
from kvstore.commit.index import Index
from kvstore.commit.journal import Change, Entry
from kvstore.commit.staging import RUNNING, exclusive_store_lock, live_pins, sweep
from kvstore.disk import files
from kvstore.disk.clock import timestamp
from kvstore.errors import AmemError, BusyError, ConflictError, DamageError, UsageError
from kvstore.format.kinds import AGENT, BLOCK, DOMAIN, SNAPSHOT, StoredObject, kind_named
from kvstore.format.records import AgentRef, Domain, SnapshotRef
from kvstore.graph.objects import size_of, stored_objects
from kvstore.graph.roots import agent_roots
from kvstore.graph.walk import Holders, own_history
from kvstore.naming import Ref
from kvstore.remove.certificate import Certificate
from kvstore.store import Store

Action = Literal["removed", "erased", "left", "kept", "failed"]


@dataclass(frozen=True)
class Removed:
    """What happened to one ref or file. `left`: the next gc deletes it; `kept`: `held_by` needs it."""

    kind: str  # agent, snapshot, domain, index, or the name of an object kind
    name: str  # a user's name of a ref, the SHA-256 of a file, the id of a domain
    action: Action
    reason: str | None = None
    held_by: tuple[str, ...] = ()
    bytes: int = 0


@dataclass(frozen=True)
class Removal:
    """One removal, done or (`dry_run`) planned. `certificate` is that of an erasure that was done."""

    what: str  # the target, as the user named it
    objects: tuple[Removed, ...]
    certificate: Certificate | None
    dry_run: bool

    @property
    def complete(self) -> bool:
        """Whether everything was removed as asked."""
        return not any(found.action in ("kept", "failed") for found in self.objects)

    def bytes_of(self, action: Action) -> int:
        return sum(found.bytes for found in self.objects if found.action == action)


@dataclass(frozen=True)
class _Target:
    """The refs to remove, all of one domain; `whole` is that domain where it is removed itself."""

    what: str
    domain: str
    agents: tuple[AgentRef, ...]
    snapshots: tuple[SnapshotRef, ...]
    whole: Domain | None

    @property
    def names(self) -> list[str]:
        """The agents to hold, in the one order in which several are locked."""
        return sorted({agent.name for agent in self.agents} | {snapshot.agent for snapshot in self.snapshots})


@dataclass(frozen=True)
class _Plan:
    """The fate of every ref and file, and whether the domain ends."""

    objects: tuple[Removed, ...]
    ends_domain: bool


def remove(store: Store, ref: Ref, wait: float, *, erase: bool = False, dry_run: bool = False) -> Removal:
    """Remove an agent with its snapshots and history, or one snapshot; with `erase` their bytes too.

    Raises NotFoundError, UsageError for an earlier state, BusyError after `wait` seconds, and DamageError where it is
    unknown what others need: nothing is removed then.
    """
    return _remove(store, ref, wait, erase, dry_run)


def remove_domain(store: Store, name: str, wait: float, *, erase: bool = False, dry_run: bool = False) -> Removal:
    """Remove a domain, by its name or id, and all of its agents. Raises as `remove`."""
    return _remove(store, name, wait, erase, dry_run)


def _remove(store: Store, what: Ref | str, wait: float, erase: bool, dry_run: bool) -> Removal:
    target = _find(store, what)
    if dry_run:
        return Removal(target.what, _plan(store, target, erase).objects, None, dry_run=True)
    with ExitStack() as stack:
        for name in target.names:
            stack.enter_context(store.hold(name, wait))
        if erase:
            stack.enter_context(exclusive_store_lock(store.layout, store.actor))
            sweep(store.layout)
        held, target = target.names, _find(store, what)
        if target.names != held:
            raise ConflictError(f"the agents of {target.what} changed meanwhile", "remove it again")
        plan = _plan(store, target, erase)
        last = _move(store, target, plan, erase)
        if not erase:
            return Removal(target.what, plan.objects, None, dry_run=False)
        objects = tuple(_unlink(store, target.domain, plan))
        return Removal(target.what, objects, _certificate(store, target, plan, objects, last), dry_run=False)


def _find(store: Store, what: Ref | str) -> _Target:
    if isinstance(what, str):
        domain = _domain(store, what)
        agents = tuple(agent for agent in store.agents() if agent.domain == domain.id)
        return _Target(f"domain {what}", domain.id, agents, (), domain)
    if what.snapshot is not None:
        snapshot = store.snapshot(what.agent, what.snapshot)
        return _Target(str(what), snapshot.domain, (), (snapshot,), None)
    if not what.is_head:
        raise UsageError(f"{what} is neither an agent nor a snapshot", "earlier states go with their agent, or by gc")
    agent = store.agent(what.agent)
    return _Target(str(what), agent.domain, (agent,), (), None)


def _domain(store: Store, name: str) -> Domain:
    """The domain of that id or name: a domain made for one agent has no name."""
    for domain in store.domains():
        if name == domain.id:
            return domain
    if re.fullmatch("[0-9a-f]{32}", name) and store.layout.domain(name).is_dir():  # an erasure of it was cut short
        return Domain(name, None, salt="", created="")
    return store.domain_named(name)


def _plan(store: Store, target: _Target, erase: bool) -> _Plan:
    """Plan the fate of every ref and file. Raises DamageError where an erasure cannot know what others need."""
    stay = [a for a in store.agents() if a.domain == target.domain and a not in target.agents]
    pins = live_pins(store.layout)
    ends_domain = not stay and target.domain not in pins and not target.snapshots
    if target.whole and target.domain in pins:
        raise BusyError(f"{target.what} is in use by {RUNNING}", "wait until it is done")
    gone = [Removed(AGENT.name, agent.name, "removed") for agent in target.agents]
    gone += [Removed(SNAPSHOT.name, str(Ref(s.agent, s.name)), "removed") for s in _snapshots(store, target)]
    if ends_domain and (erase or target.whole):
        gone.append(Removed(DOMAIN.name, target.domain, "erased" if erase else "removed"))
    held = _held_by_others(store, target, stay, lenient=not erase)
    files_ = _files(store, target, held, pins, erase)
    return _Plan((*gone, *files_), ends_domain and (erase or target.whole is not None))


def _snapshots(store: Store, target: _Target) -> list[SnapshotRef]:
    return [*target.snapshots, *(s for agent in target.agents for s in store.snapshots(agent.name))]


def _held_by_others(store: Store, target: _Target, stay: Sequence[AgentRef], *, lenient: bool) -> Holders:
    holders = Holders(store, target.domain)
    removed = {store.layout.snapshot_ref(s.agent, s.name) for s in target.snapshots}
    for agent in stay:
        roots = [root.manifest for root in agent_roots(store, agent) if root.path not in removed]
        try:
            holders.add(agent.name, own_history(agent.id), roots, lenient=lenient)
        except DamageError as damage:
            hint = f"nothing was removed; repair agent {agent.name} first, or erase it"
            raise DamageError(
                f"the files that agent {agent.name} needs are unknown: {damage.message}", hint
            ) from damage
    return holders


def _files(store: Store, target: _Target, held: Holders, pins: set[str], erase: bool) -> Iterator[Removed]:
    """Plan the fate of every file reachable from the target, and in an erasure of unreachable files."""
    own = Holders(store, target.domain)
    for agent in target.agents:
        roots = [root.manifest for root in agent_roots(store, agent)]
        own.add(agent.name, own_history(agent.id), roots, lenient=True)
    for snapshot in target.snapshots:
        own.add(snapshot.agent, own_history(snapshot.agent_id), [snapshot.manifest], lenient=True)
    for found in stored_objects(store.layout, target.domain):
        kind, name, size = found.kind.name, found.sha256, size_of(store.layout, target.domain, found)
        if found in held.of:
            if found in own.of:
                yield Removed(kind, name, "kept", "others need it", tuple(sorted(held.of[found])), size)
        elif erase and name in pins:
            yield Removed(kind, name, "kept", "it is in use", (RUNNING,), size)
        elif erase:
            yield Removed(kind, name, "erased", bytes=size)
        elif found in own.of:
            yield Removed(kind, name, "left", "the next gc deletes it", bytes=size)


def _move(store: Store, target: _Target, plan: _Plan, erase: bool) -> Entry:
    """Remove the refs, each after its line in the journal. Returns the last line."""
    layout, domain = store.layout, target.domain
    with refs.moving(layout, store.actor) as journal:
        for agent in target.agents:
            last = journal.append(Change(refs.ERASE if erase else refs.REMOVE, agent.id, domain, agent.manifest, None))
            refs.remove_agent(layout, agent)
        for snapshot in target.snapshots:
            op = refs.ERASE_SNAPSHOT if erase else refs.REMOVE_SNAPSHOT
            change = Change(op, snapshot.agent_id, domain, snapshot.manifest, None, snapshot.created)
            last = journal.append(change)
            refs.remove_snapshot(layout, snapshot)
        if plan.ends_domain:
            last = journal.append(Change(refs.ERASE_DOMAIN if erase else refs.REMOVE_DOMAIN, "", domain, None, None))
            if erase:
                refs.remove_domain(layout, domain)
            elif target.whole:
                refs.free_domain_name(layout, target.whole)
    return last


def _unlink(store: Store, domain: str, plan: _Plan) -> Iterator[Removed]:
    """Delete what is to be erased, continuing after a failure; then its index rows, and an empty domain's folder."""
    layout = store.layout
    folders: set[Path] = set()
    for planned in plan.objects:
        kind = kind_named(planned.kind)
        if planned.action != "erased" or kind is None:
            yield planned
            continue
        path = layout.object(domain, kind, planned.name)
        with _failing(planned) as failures:
            files.unlink(path)
            folders.add(path.parent)
        yield from failures or [planned]
    blocks = (
        None if plan.ends_domain else [o.name for o in plan.objects if (o.kind, o.action) == (BLOCK.name, "erased")]
    )
    with _failing(Removed("index", "index.sqlite", "failed")) as failures:
        Index(layout).forget(domain, blocks)
    yield from failures
    with _failing(Removed(DOMAIN.name, domain, "failed")) as failures:
        if plan.ends_domain:
            _remove_folder(layout.domain(domain))
            files.sync_dir(layout.domains)
        else:
            for folder in sorted(folders):
                files.sync_dir(folder)
    yield from failures


@contextmanager
def _failing(planned: Removed) -> Iterator[list[Removed]]:
    """Collects the failure of one step, so that the others are still taken."""
    failures: list[Removed] = []
    try:
        yield failures
    except AmemError as error:
        failures.append(replace(planned, action="failed", reason=error.message))


def _remove_folder(path: Path) -> None:
    """Remove a folder and all folders in it."""
    for child in list(path.iterdir()):
        if child.is_dir() and not child.is_symlink():
            _remove_folder(child)
    files.remove_folder(path)


def _certificate(store: Store, target: _Target, plan: _Plan, objects: Sequence[Removed], last: Entry) -> Certificate:
    by_action: dict[Action, list[str]] = {"erased": [], "kept": [], "failed": []}
    for found in objects:
        if kind := kind_named(found.kind):
            by_action[found.action].append(str(StoredObject(kind, found.name)))
    return Certificate(
        store=store.id,
        domain=target.domain,
        domain_erased=plan.ends_domain,
        agents=tuple(agent.id for agent in target.agents),
        snapshots=tuple(snapshot.created for snapshot in target.snapshots),
        erased=tuple(by_action["erased"]),
        remaining=(*by_action["kept"], *by_action["failed"]),
        journal_seq=last.seq,
        journal_head=last.digest,
        time=timestamp(),
    )
