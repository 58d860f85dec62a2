"""A store whose agents share blocks through forks."""

import pytest

from kvstore.lifecycle import fork, snapshot
from kvstore.naming import Ref
from kvstore.store import Store
from tests.support.making import commit


@pytest.fixture
def forked(store: Store) -> Store:
    """`a` with a snapshot and two states more than its fork `b`."""
    commit(store, "a", range(600))
    snapshot(store, Ref("a"), "s")
    fork(store, Ref("a"), "b")
    commit(store, "a", range(1000))
    commit(store, "a", range(1300))
    return store
