import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvstore.disk import files
from kvstore.disk.locks import Lock, lock_folder
from kvstore.errors import BusyError
from tests.support.running import children

HOLDER = """
import sys
from pathlib import Path
from kvstore.disk.locks import Lock
with Lock(Path(sys.argv[1]), "agent a", "chat").acquire(shared=False, wait=0):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_busy_lock_names_its_holder(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with children.start(sys.executable, "-c", HOLDER, path, **pipes) as process:
        assert process.stdout and process.stdout.readline() == b"held\n"
        with pytest.raises(BusyError, match=rf"agent a is held by process {process.pid} \(chat\) since 2") as caught:
            Lock(path, "agent a", "extend").acquire(shared=False, wait=0.05)
        assert "--wait" in str(caught.value.hint)
        process.kill()
        process.wait()
        with Lock(path, "agent a", "extend").acquire(shared=False, wait=5) as lock:  # a dead process holds nothing
            assert lock.held
    assert not lock.held
    assert path.exists()


def test_shared_locks_go_together(tmp_path: Path) -> None:
    def make() -> Lock:
        return Lock(tmp_path / "lock", "the store", "test")

    with make().acquire(shared=True, wait=0), make().acquire(shared=True, wait=0):
        started = time.monotonic()
        with pytest.raises(BusyError):
            make().acquire(shared=False, wait=0.1)
        assert 0.1 <= time.monotonic() - started < 5
    with make().acquire(shared=False, wait=0), pytest.raises(BusyError):
        make().acquire(shared=True, wait=0)


def test_a_lock_whose_holder_could_not_sign(tmp_path: Path, steps: list[str]) -> None:
    """On a full disk the lock is taken all the same: gc needs it."""

    def full(step: str, _: Path) -> None:
        if step == "write":
            raise OSError(28, "full")

    files.fault = full
    with (
        Lock(tmp_path / "lock", "the store", "gc").acquire(shared=False, wait=0),
        pytest.raises(BusyError, match="held by another process"),
    ):
        Lock(tmp_path / "lock", "the store", "gc").acquire(shared=False, wait=0)
    assert steps == []


def test_a_folder_is_locked_once(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    assert lock_folder(folder) is None
    folder.mkdir()
    descriptor = lock_folder(folder)
    assert descriptor is not None
    assert lock_folder(folder) is None
    os.close(descriptor)
    again = lock_folder(folder)
    assert again is not None
    os.close(again)
