"""What several of the engine's tests share."""

from pathlib import Path

import pytest

from tests.support.places import Place
from tests.support.tiny import make_tiny_model


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose answers never end by themselves."""
    return make_tiny_model(tmp_path_factory.mktemp("endless"))
