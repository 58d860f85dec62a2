"""What several of the engine's tests share."""

from pathlib import Path

import pytest

from tests.commands.tiny import make_tiny_model
from tests.engine.places import Place


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose answers never end by themselves."""
    return make_tiny_model(tmp_path_factory.mktemp("endless"))
