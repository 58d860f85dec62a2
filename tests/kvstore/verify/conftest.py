"""A healthy store with everything in it."""

import pytest

from kvstore.store import Store
from tests.support.damaging import fill


@pytest.fixture
def full(store: Store) -> Store:
    return fill(store)
