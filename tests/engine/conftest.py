"""What several of the engine's tests share."""

from pathlib import Path

import pytest

from tests.support.engine.places import Place


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)
