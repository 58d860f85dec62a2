"""Models that many tests share. Each is made once a run; the real ones once a machine."""

from collections.abc import Callable
from pathlib import Path

import pytest

import amem_cli.engine  # noqa: F401  first of all: it puts a faster BLAS under MLX
from tests.support import models


@pytest.fixture(scope="session")
def gemma() -> Path:
    return models.gemma_folder()


@pytest.fixture(scope="session")
def qwen() -> Path:
    return models.qwen_folder()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny random model of a kind, with a ChatML template. Never change what is in it."""
    root = tmp_path_factory.mktemp("tiny")

    def folder(kind: str) -> Path:
        return root / kind if (root / kind).exists() else models.tiny_model(kind, root / kind)

    return folder
