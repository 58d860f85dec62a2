"""Removing agents, snapshots and domains: the refs, and with `erase` the bytes at once.

An erasure takes everything in the domain that the refs which are left do not lead to: blocks that forks still need
stay, and are told with who holds them; states that nobody led to any more, as those of a prefill that was cut short,
go too. It runs under the exclusive store lock, so that no fork, snapshot or commit can start from what is going. The
journal comes first, then the refs, then the files, a manifest before what it names: a crash leaves at most files that
no ref leads to, which gc or the same erasure of the domain removes. When no agent is left in the domain its salt goes
too, and with it the last way to test a digest against a guessed text.
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
from kvstore.commit.staging import exclusive_store_lock, live_pins, sweep
from kvstore.disk import files
from kvstore.disk.clock import timestamp
from kvstore.errors import AmemError, BusyError, ConflictError, DamageError, UsageError
from kvstore.format.records import AgentRef, Domain, SnapshotRef
from kvstore.graph.objects import StoredObject, size_of, stored_objects
from kvstore.graph.walk import Reach
from kvstore.naming import Ref
from kvstore.remove.certificate import Certificate
from kvstore.store import Store

Action = Literal["removed", "erased", "left", "kept", "failed"]
RUNNING = "a command that is running"
_FILE_KINDS = ("manifest", "page", "tail", "block")


@dataclass(frozen=True)
class Removed:
    """What became of one ref or file. `left`: gc will take it; `kept`: `held_by` needs it."""

    kind: str  # agent, snapshot, domain, index, manifest, page, block, tail
    name: str  # a user's name of a ref, the SHA-256 of a file, the id of a domain
    action: Action
    reason: str | None = None
    held_by: tuple[str, ...] = ()
    bytes: int = 0


@dataclass(frozen=True)
class Removal:
    """One removal, done or (`dry_run`) planned. `certificate` is that of an erasure that was done."""

    what: str  # what was to be removed, as the user named it
    objects: tuple[Removed, ...]
    certificate: Certificate | None
    dry_run: bool

    @property
    def complete(self) -> bool:
        """Whether nothing stayed that was to go."""
        return not any(found.action in ("kept", "failed") for found in self.objects)

    def bytes_of(self, action: Action) -> int:
        return sum(found.bytes for found in self.objects if found.action == action)


@dataclass(frozen=True)
class _Target:
    """The refs that are to go, all of one domain; `whole` is that domain where it is to go itself."""

    what: str
    domain: str
    agents: tuple[AgentRef, ...]
    snapshots: tuple[SnapshotRef, ...]
    whole: Domain | None

    @property
    def names(self) -> list[str]:
        """The agents to hold, in the one order in which everybody takes several."""
        return sorted({agent.name for agent in self.agents} | {snapshot.agent for snapshot in self.snapshots})


@dataclass(frozen=True)
class _Plan:
    """What becomes of every ref and file, and whether the domain ends."""

    objects: tuple[Removed, ...]
    ends_domain: bool


def remove(store: Store, ref: Ref, wait: float, *, erase: bool = False, dry_run: bool = False) -> Removal:
    """Remove an agent with its snapshots and history, or one snapshot; with `erase` their bytes too.

    Raises NotFoundError, UsageError for an earlier state, BusyError after `wait` seconds, and DamageError where it
    cannot be told what others need: nothing is removed then.
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
    """By its name, else by its id: a domain that was made for one agent has no name."""
    for domain in store.domains():
        if name == domain.id:
            return domain
    if re.fullmatch("[0-9a-f]{32}", name) and store.layout.domain(name).is_dir():  # an erasure of it was cut short
        return Domain(name, None, salt="", created="")
    return store.domain_named(name)


def _plan(store: Store, target: _Target, erase: bool) -> _Plan:
    """What becomes of everything. Raises DamageError where it cannot be told what others need, if that matters."""
    stay = [a for a in store.agents() if a.domain == target.domain and a not in target.agents]
    pins = live_pins(store.layout)
    ends_domain = not stay and target.domain not in pins and not target.snapshots
    if target.whole and target.domain in pins:
        raise BusyError(f"{target.what} is in use by {RUNNING}", "wait until it is done")
    gone = [Removed("agent", agent.name, "removed") for agent in target.agents]
    gone += [Removed("snapshot", str(Ref(s.agent, s.name)), "removed") for s in _snapshots(store, target)]
    if ends_domain and (erase or target.whole):
        gone.append(Removed("domain", target.domain, "erased" if erase else "removed"))
    held = _held_by_others(store, target, stay, lenient=not erase)
    files_ = _files(store, target, held, pins, erase)
    return _Plan((*gone, *files_), ends_domain and (erase or target.whole is not None))


def _snapshots(store: Store, target: _Target) -> list[SnapshotRef]:
    return [*target.snapshots, *(s for agent in target.agents for s in store.snapshots(agent.name))]


def _held_by_others(store: Store, target: _Target, stay: Sequence[AgentRef], *, lenient: bool) -> Reach:
    reach = Reach(store, target.domain)
    for agent in stay:
        snapshots = [s.manifest for s in store.snapshots(agent.name) if s not in target.snapshots]
        try:
            reach.mark(agent.name, agent.id, [agent.manifest, *snapshots], lenient=lenient)
        except DamageError as damage:
            hint = f"nothing was removed; repair agent {agent.name} first, or erase it"
            raise DamageError(f"what agent {agent.name} needs cannot be told: {damage.message}", hint) from damage
    return reach


def _files(store: Store, target: _Target, held: Reach, pins: set[str], erase: bool) -> Iterator[Removed]:
    """What becomes of the files that the target leads to, and in an erasure of those that nobody leads to."""
    own = Reach(store, target.domain)
    for agent in target.agents:
        roots = [agent.manifest, *(s.manifest for s in store.snapshots(agent.name))]
        own.mark(agent.name, agent.id, roots, lenient=True)
    for snapshot in target.snapshots:
        own.mark(snapshot.agent, snapshot.agent_id, [snapshot.manifest], lenient=True)
    for found in stored_objects(store.layout, target.domain):
        kind, name, size = found.kind.removesuffix("s"), found.sha256, size_of(store.layout, target.domain, found)
        if found in held.holders:
            if found in own.holders:
                yield Removed(kind, name, "kept", "others need it", tuple(sorted(held.holders[found])), size)
        elif erase and name in pins:
            yield Removed(kind, name, "kept", "it is in use", (RUNNING,), size)
        elif erase:
            yield Removed(kind, name, "erased", bytes=size)
        elif found in own.holders:
            yield Removed(kind, name, "left", "the next gc takes it", bytes=size)


def _move(store: Store, target: _Target, plan: _Plan, erase: bool) -> Entry:
    """End the refs, each after its line in the journal. Returns the last line."""
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
    """Unlink what is to be erased, going on after a failure; then its index rows, and an empty domain's folder."""
    layout = store.layout
    folders: set[Path] = set()
    for planned in plan.objects:
        if planned.action != "erased" or planned.kind == "domain":
            yield planned
            continue
        path = StoredObject(f"{planned.kind}s", planned.name).path(layout, domain)
        with _failing(planned) as failures:
            files.unlink(path)
            folders.add(path.parent)
        yield from failures or [planned]
    blocks = None if plan.ends_domain else [o.name for o in plan.objects if (o.kind, o.action) == ("block", "erased")]
    with _failing(Removed("index", "index.sqlite", "failed")) as failures:
        Index(layout).forget(domain, blocks)
    yield from failures
    with _failing(Removed("domain", domain, "failed")) as failures:
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
        if found.kind in _FILE_KINDS:
            by_action[found.action].append(f"{found.kind} sha256:{found.name}")
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
