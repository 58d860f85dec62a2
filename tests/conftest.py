"""What all tests run in: memory instead of a disk, processes that end with their test, models that many share."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import amem_cli.engine  # noqa: F401  first of all: it puts a faster BLAS under MLX
from tests.support import models
from tests.support.running import children, memory

_folder = pytest.StashKey[Path]()


def pytest_configure(config: pytest.Config) -> None:
    """Put temporary folders into memory, unless `--basetemp` or the process that started this one chose a place."""
    if config.option.basetemp is None and (folder := memory.enter()):
        config.stash[_folder] = folder
        config.option.basetemp = str(folder / "tests")


def pytest_unconfigure(config: pytest.Config) -> None:
    if folder := config.stash.get(_folder, None):
        memory.leave(folder)


@pytest.fixture(scope="session", autouse=True)
def _children_have_default_signals() -> None:
    children.unignore()


@pytest.fixture(autouse=True)
def _no_child_outlives_its_test() -> Iterator[None]:
    yield
    children.kill_all()


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
