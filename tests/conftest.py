"""What all tests run in: memory instead of a disk, processes that end with their test, models that many share."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import amem_cli.engine  # noqa: F401  first of all: it puts a faster BLAS under MLX
from tests.support.models import real
from tests.support.models.chat import tiny_model
from tests.support.models.endless import endless_model
from tests.support.running import children, memory

REAL_MODELS = {"gemma", "qwen"}  # fixtures


def pytest_configure(config: pytest.Config) -> None:
    """Put temporary folders into memory, unless `--basetemp` or the process that started this one chose a place."""
    if config.option.basetemp is None and (folder := memory.enter()):
        config.option.basetemp = str(folder / "tests")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put long tests first, so that no worker is left alone with one at the end."""
    for item in items:
        if REAL_MODELS.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.long)
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.fixture(scope="session", autouse=True)
def _children_have_default_signals() -> None:
    children.unignore()


@pytest.fixture(autouse=True)
def _no_child_outlives_its_test() -> Iterator[None]:
    yield
    children.kill_all()


@pytest.fixture(scope="session")
def gemma() -> Path:
    return real.gemma_folder()


@pytest.fixture(scope="session")
def qwen() -> Path:
    return real.qwen_folder()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny random model of a kind, with a ChatML template. Never change what is in it."""
    root = tmp_path_factory.mktemp("tiny")

    def folder(kind: str) -> Path:
        return root / kind if (root / kind).exists() else tiny_model(kind, root / kind)

    return folder


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose answers never end by themselves. Never change what is in it."""
    return endless_model(tmp_path_factory.mktemp("endless"))
