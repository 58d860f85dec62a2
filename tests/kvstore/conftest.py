from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import files
from kvstore.store import Store
from tests.kvstore.making import ACTOR


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open_or_create(tmp_path / "store", ACTOR)


@pytest.fixture
def steps() -> Iterator[list[str]]:
    """The steps of all mutations of the file system from here on."""
    seen: list[str] = []
    files.fault = lambda step, _: seen.append(step)
    yield seen
    files.fault = None
