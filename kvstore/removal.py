"""Removing agents, snapshots and domains: the refs, and with `erase` the bytes at once.

An erasure takes everything in the domain that the refs which are left do not lead to: blocks that forks still need
stay, and are told with who holds them; states that nobody led to any more, as those of a prefill that was cut short,
go too. It runs under the exclusive store lock, so that no fork, snapshot or commit can start from what is going. The
journal comes first, then the refs, then the files, a manifest before what it names: a crash leaves at most files that
no ref leads to, which gc or the same erasure of the domain removes. When no agent is left in the domain its salt goes
too, and with it the last way to test a digest against a guessed text.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal

from kvstore import files, refs
from kvstore.erase import Certificate, certify
from kvstore.errors import AmemError, ConflictError, DamageError, NotFoundError, UsageError
from kvstore.index import Index
from kvstore.journal import Change, Entry, JournalWriter
from kvstore.naming import Ref
from kvstore.reach import KINDS, Reach, StoredObject, live_pins, size_of, stored_objects
from kvstore.refs import AgentRef, Domain, SnapshotRef
from kvstore.staging import exclusive_store_lock, sweep
from kvstore.store import Store

Action = Literal["removed", "erased", "left", "kept", "failed"]
RUNNING = "a command that is running"


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
        """Whether nothing stayed that an erasure was to take, and nothing failed."""
        return not any(found.action in ("kept", "failed") for found in self.objects)

    def bytes_of(self, action: Action) -> int:
        return sum(found.bytes for found in self.objects if found.action == action)


@dataclass(frozen=True)
class _Target:
    """The refs that are to go, all of one domain, and whether the domain is to go whatever it holds."""

    what: str
    domain: str
    agents: tuple[AgentRef, ...]
    snapshots: tuple[SnapshotRef, ...] = ()
    whole: Domain | None = None

    @property
    def names(self) -> list[str]:
        """The agents to hold, in the one order in which everybody takes them."""
        return sorted({agent.name for agent in self.agents} | {snapshot.agent for snapshot in self.snapshots})


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
        plan = _Plan(store, target)
        return Removal(target.what, (*_refs_of(target, plan.ends_domain), *plan.files(erase)), None, dry_run=True)
    with ExitStack() as stack:
        held = [stack.enter_context(store.hold(name, wait)) for name in target.names]
        if erase:
            stack.enter_context(exclusive_store_lock(store.layout, store.actor))
            sweep(store.layout)
        target = _find(store, what)
        if target.names != [hold.name for hold in held]:
            raise ConflictError(f"{target.what} got an agent while it was being removed", "remove it again")
        plan = _Plan(store, target)
        if not erase:
            _move(store, target, plan, erase)
            return Removal(target.what, (*_refs_of(target, plan.ends_domain), *plan.files(erase)), None, dry_run)
        last = _move(store, target, plan, erase)
        objects = (*_refs_of(target, plan.ends_domain), *_unlink(store, plan))
        agents = [agent.id for agent in target.agents]
        gone = [f"{found.kind} sha256:{found.name}" for found in objects if found.action == "erased"]
        stayed = [f"{found.kind} sha256:{found.name}" for found in objects if found.action in ("kept", "failed")]
        certificate = certify(store, target.domain, agents, plan.ends_domain, gone, stayed, last)
        return Removal(target.what, objects, certificate, dry_run)


def _find(store: Store, what: Ref | str) -> _Target:
    if isinstance(what, str):
        domain = _domain(store, what)
        agents = tuple(agent for agent in store.agents() if agent.domain == domain.id)
        return _Target(f"domain {what}", domain.id, agents, whole=domain)
    if what.snapshot is not None:
        snapshot = store.snapshot(what.agent, what.snapshot)
        return _Target(str(what), snapshot.domain, (), (snapshot,))
    if not what.is_head:
        raise UsageError(f"{what} is neither an agent nor a snapshot", "earlier states go with their agent, or by gc")
    agent = store.agent(what.agent)
    return _Target(str(what), agent.domain, (agent,))


def _domain(store: Store, name: str) -> Domain:
    """By its name, else by its id: a domain that was made for one agent has no name."""
    for domain in store.domains():
        if name == domain.id and domain.name != name:
            return domain
    return store.domain_named(name)


class _Plan:
    """Which files of the domain stay, and who holds them."""

    def __init__(self, store: Store, target: _Target) -> None:
        self._store, self._target = store, target
        self._gone = {agent.id for agent in target.agents}
        self.pins = live_pins(store.layout)
        self.others = self._mark_others()
        self.ends_domain = self._is_left_empty()

    def _mark_others(self) -> Reach:
        """What the refs that stay lead to. Raises DamageError where that cannot be told."""
        reach = Reach(self._store, self._target.domain)
        for agent in self._store.agents():
            if agent.domain != self._target.domain or agent.id in self._gone:
                continue
            snapshots = [s for s in self._store.snapshots(agent.name) if s not in self._target.snapshots]
            try:
                reach.mark(agent.name, agent.id, [agent.manifest, *(s.manifest for s in snapshots)])
            except DamageError as damage:
                hint = f"nothing was removed; repair agent {agent.name} or erase it first"
                raise DamageError(f"what agent {agent.name} needs cannot be told: {damage.message}", hint) from damage
        return reach

    def _is_left_empty(self) -> bool:
        """Whether no agent will be left in the domain, and nobody is about to make one."""
        domain = self._target.domain
        inhabited = any(agent.domain == domain and agent.id not in self._gone for agent in self._store.agents())
        return bool(self._gone or self._target.whole) and not inhabited and domain not in self.pins

    def files(self, erase: bool) -> Iterator[Removed]:
        """What becomes of each file that the target led to, and with `erase` of those that nobody led to."""
        layout, domain = self._store.layout, self._target.domain
        for found in stored_objects(layout, domain) if erase else self._own():
            size = size_of(layout, domain, found)
            kind, name = found.kind.removesuffix("s"), found.sha256
            if holders := self.others.holders.get(found):
                if not erase or found in self._own_set:
                    yield Removed(kind, name, "kept", "others need it", tuple(sorted(holders)), size)
            elif name in self.pins:
                yield Removed(kind, name, "kept", "it is in use", (RUNNING,), size)
            elif erase:
                yield Removed(kind, name, "erased", None, (), size)
            else:
                yield Removed(kind, name, "left", "the next gc takes it", (), size)
