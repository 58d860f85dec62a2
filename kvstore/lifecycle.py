"""Snapshot, restore and fork: names and heads move, and no block is copied."""

from dataclasses import dataclass

from kvstore.commit import refs
from kvstore.commit.journal import Change
from kvstore.commit.staging import shared_store_lock
from kvstore.disk.clock import timestamp
from kvstore.errors import ConflictError, NotFoundError
from kvstore.format.document import replace
from kvstore.format.manifest import Manifest
from kvstore.format.records import SnapshotRef
from kvstore.history.resolve import State
from kvstore.naming import Ref, check_name, file_name, new_id
from kvstore.store import Store

UNDO_DIGITS = 16


@dataclass(frozen=True)
class Restored:
    """The head before and after a restore, as digests, and the REF whose restore undoes it (None: nothing moved)."""

    before: str
    after: str
    undo: str | None


def snapshot(store: Store, ref: Ref, name: str | None = None, note: str | None = None) -> tuple[SnapshotRef, bool]:
    """Name the last committed state of `ref`; without a name it is the next of s1, s2, ...

    Returns the snapshot and whether it is new: the same one of the same state is there already. Never waits for the
    agent. Raises NotFoundError, UsageError, ConflictError where the name belongs to another state.
    """
    if name is not None:
        check_name("snapshot", name)
    state = store.resolve(ref)
    with shared_store_lock(store.layout, store.actor), refs.moving(store.layout, store.actor) as journal:
        _check_kept(store, state)
        taken = {file_name(other.name): other for other in store.snapshots(ref.agent)}
        if name is None:
            name = next(free for n in range(1, len(taken) + 2) if (free := f"s{n}") not in taken)
        if existing := taken.get(file_name(name)):
            if (existing.name, existing.manifest) == (name, state.digest):
                return existing, False
            raise ConflictError(f"{ref.agent}@{existing.name} names another state", "take another name")
        before = after = state.digest
        entry = journal.append(Change(refs.SNAPSHOT, state.agent.id, state.agent.domain, before, after, note))
        made = SnapshotRef(ref.agent, name, state.agent.id, state.agent.domain, state.digest, note, entry.time)
        refs.put(store.layout, made)
        return made, True


def _check_kept(store: Store, state: State) -> None:
    """The agent and the state are still there, now that gc and other writers must wait."""
    agent = state.agent
    if store.agent(agent.name).id != agent.id or not store.has_manifest(agent.domain, state.digest):
        raise NotFoundError(f"{state.ref} has just been removed", f"see what is left: `amem log {agent.name}`")


def restore(store: Store, ref: Ref, wait: float, expect: str | None = None, note: str | None = None) -> Restored:
    """Move an agent's head to an earlier state of it, by a new manifest that resumes it.

    `expect` is a prefix of the digest that the head must have. Where the head is that state already, or its restore,
    nothing moves. Raises NotFoundError, BusyError after `wait` seconds, ConflictError where the head is another.
    """
    store.agent(ref.agent)
    with store.hold(ref.agent, wait) as hold:
        target = store.resolve(ref)
        before = target.agent.manifest
        if expect is not None and not before.startswith(expect):
            raise ConflictError(f"the head of agent {ref.agent} is sha256:{before}", "look at it and try again")
        head = store.manifest(target.agent.domain, before)
        if target.digest == before or (head.op == "restore" and head.resumes == target.digest):
            return Restored(before, before, None)
        manifest = _resume(target, "restore", target.agent.id, previous=before)
        with store.transaction(store.domain(target.agent.domain)) as transaction:
            after = transaction.commit(hold, manifest, before, note)
    return Restored(before, after, str(Ref(ref.agent, digest=before[:UNDO_DIGITS])))


def fork(store: Store, ref: Ref, new_name: str, note: str | None = None, wait: float = 0.0) -> State:
    """Continue a state as a new agent of the same domain. Waits for the new name only, never for the source.

    Returns the new agent's first state. Raises NotFoundError, UsageError, BusyError, ConflictError where an agent
    has that name.
    """
    source = store.resolve(ref)
    with store.hold(new_name, wait) as hold:
        if hold.agent:
            raise ConflictError(f"agent {new_name} exists already", "take another name")
        manifest = _resume(source, "fork", new_id(), previous=None)
        with store.transaction(store.domain(source.agent.domain)) as transaction:
            transaction.commit(hold, manifest, None, note)
        return store.resolve(Ref(new_name))  # still held, so that no other process can have removed it


def _resume(source: State, op: str, agent_id: str, previous: str | None) -> Manifest:
    return replace(
        source.manifest,
        agent=agent_id,
        previous=previous,
        resumes=source.digest,
        op=op,
        created=timestamp(),
    )
