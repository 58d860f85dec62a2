"""Every mutation is killed at and failed at in turn: the old state or the new one, and the next writer works."""

import errno
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.disk import files
from kvstore.errors import AmemError, NoSpaceError
from kvstore.format.layout import StoreLayout
from kvstore.store import Store
from tests.support.faults.scenarios import NAMES, at_mutation, change, prepare
from tests.support.making import ACTOR, commit, fast_folder, journal, picture
from tests.support.running import children


@pytest.fixture(autouse=True)
def _no_fault_left() -> Iterator[None]:
    yield
    files.fault = None


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder() -> Iterator[Path]:
    with fast_folder() as folder:
        yield folder


@pytest.fixture
def base(name: str, folder: Path) -> Path:
    root = folder / "base"
    root.mkdir()
    prepare(name, root)
    return root


def new_picture(name: str, base: Path) -> dict[str, list[int]]:
    root = base.with_name("new")
    shutil.copytree(base, root)
    change(name, root)
    return picture(root)


def check_next_writer(root: Path) -> None:
    """The next writer works, and sets right what the journal and the staging folder still hold."""
    commit(Store.open_or_create(root, ACTOR), "next", range(10))
    assert picture(root)["next"] == list(range(10))
    assert [path for path in StoreLayout(root).staging.iterdir() if path.is_dir()] == []
    entries = journal(root)
    voided = {entry.seq - 1 for entry in entries if entry.change.op == "void"}
    moves = [entry.change for entry in entries if entry.change.op != "void" and entry.seq not in voided]
    store = Store.open(root, ACTOR)
    agents = store.agents()
    heads = {move.agent_id: move.after for move in moves if move.op != "snapshot"}
    assert {agent.id: agent.manifest for agent in agents} == heads
    snapshots = [snapshot for agent in agents for snapshot in store.snapshots(agent.name)]
    assert len(snapshots) == len([move for move in moves if move.op == "snapshot"])


@pytest.mark.long
def test_killed_at_every_mutation(name: str, base: Path, folder: Path) -> None:
    old, new = picture(base), new_picture(name, base)
    out = folder / "killed"
    children.run(sys.executable, "-m", "tests.support.faults.scenarios", name, base, out, check=True)
    roots = sorted(out.iterdir(), key=lambda path: int(path.name))
    assert len(roots) > 15
    assert picture(roots[0]) == old
    assert picture(roots[-1]) == new
    for root in roots[:-1]:
        assert picture(root) in (old, new), root.name
        check_next_writer(root)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_failed_at_every_mutation(name: str, base: Path, folder: Path, code: int) -> None:
    """A full disk stays full, but lets files go; a bad sector is met once."""
    old, new = picture(base), new_picture(name, base)
    number = 0
    while True:
        root = folder / str(number)
        shutil.copytree(base, root)
        done, error = run_failing(name, root, number, code)
        assert picture(root) == new if error is None else picture(root) in (old, new), number
        if done:
            break
        assert error is None or isinstance(error, NoSpaceError) == (code == errno.ENOSPC)
        assert [path for path in root.glob("domains/*/*/*/*") if path.stat().st_size == 0] == []
        check_next_writer(root)
        shutil.rmtree(root)
        number += 1
    assert number > 15


def run_failing(name: str, root: Path, number: int, code: int) -> tuple[bool, AmemError | None]:
    """Whether the change ran through without meeting the fault, and the error that it ended with."""
    met = False

    def fail(step: str) -> None:
        nonlocal met
        if code == errno.ENOSPC and step in ("unlink", "remove", "truncate"):
            return
        if code == errno.ENOSPC or not met:
            met = True
            raise OSError(code, os.strerror(code))

    files.fault = at_mutation(number, fail)
    try:
        change(name, root)
    except AmemError as error:
        return False, error
    finally:
        files.fault = None
    return not met, None
