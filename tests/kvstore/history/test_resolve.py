"""A REF is resolved without a lock, beside processes that remove what it names."""

import pytest

from kvstore.errors import BusyError, DamageError, NotFoundError
from kvstore.format.kinds import MANIFEST
from kvstore.format.records import AgentRef
from kvstore.history.resolve import State
from kvstore.lifecycle import fork
from kvstore.naming import Ref
from kvstore.remove.remove import remove
from kvstore.store import Store
from tests.support.making import commit


class ErasedMeanwhile(Store):
    """A store in which the ref that was just read is erased before what it names is read."""

    def agent(self, name: str) -> AgentRef:
        found = super().agent(name)
        remove(Store.open(self.layout.root, self.actor), Ref(name), 0, erase=True)
        return found


def test_what_is_erased_meanwhile_is_not_found_rather_than_damaged(store: Store) -> None:
    commit(store, "alice", range(300))
    with pytest.raises(NotFoundError):
        ErasedMeanwhile.open(store.layout.root, store.actor).resolve(Ref("alice"))


def test_a_missing_file_that_nobody_removed_is_damage(store: Store) -> None:
    commit(store, "alice", range(300))
    alice = store.agent("alice")
    store.layout.object(alice.domain, MANIFEST, alice.manifest).unlink()
    with pytest.raises(DamageError, match="is missing"):
        store.resolve(Ref("alice"))


class ErasedAtTheEnd(Store):
    """A store in which an erasure is tried when a fork reads its first state back."""

    def resolve(self, ref: Ref) -> State:
        if ref.agent == "bob":
            with pytest.raises(BusyError):
                remove(Store.open(self.layout.root, self.actor), ref, 0, erase=True)
        return super().resolve(ref)


def test_a_fork_is_held_until_it_is_answered(store: Store) -> None:
    commit(store, "alice", range(300))
    forked = fork(ErasedAtTheEnd.open(store.layout.root, store.actor), Ref("alice"), "bob")
    assert forked.digest == store.agent("bob").manifest
