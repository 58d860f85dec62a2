from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.disk import files
from kvstore.lifecycle import snapshot
from kvstore.naming import Ref
from kvstore.store import Store
from tests.support.making import ACTOR, commit


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open_or_create(tmp_path / "store", ACTOR)


@pytest.fixture
def other(tmp_path: Path) -> Store:
    """A second store."""
    return Store.open_or_create(tmp_path / "other", ACTOR)


@pytest.fixture
def agent(store: Store) -> Store:
    """`a` with three states, of which the second is named `s`."""
    commit(store, "a", range(600))
    commit(store, "a", range(700))
    snapshot(store, Ref("a"), "s", note="why")
    commit(store, "a", range(1000))
    return store


@pytest.fixture
def steps() -> Iterator[list[str]]:
    """The steps of all mutations of the file system from here on."""
    seen: list[str] = []
    files.fault = lambda step, _: seen.append(step)
    yield seen
    files.fault = None
