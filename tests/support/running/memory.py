"""Temporary folders in memory: tests flush thousands of times, which takes minutes on a disk and shows nothing more.

Where a system has no such folder, or one that is too small, temporary folders stay where they are.
"""

import os
import shutil
import tempfile
from multiprocessing.util import Finalize
from pathlib import Path

FOLDER = Path("/dev/shm")
PREFIX = "amem-tests-"
_AFTER_MULTIPROCESSING = -200  # it removes a temporary folder of its own, with priority -100
_LEAST_ROOM = 4 << 30  # bytes; a whole run takes less than half of it


def has_room() -> bool:
    """Whether there is a folder in memory with room for a run of the tests."""
    return os.access(FOLDER, os.W_OK) and shutil.disk_usage(FOLDER).free >= _LEAST_ROOM


def enter() -> Path | None:
    """Let this process and its children make temporary files in a new folder in memory, and return that.

    It is removed at the end of this process. None where memory has no room. Folders of runs that were killed are
    removed first.
    """
    if not has_room():
        return None
    for left in FOLDER.glob(f"{PREFIX}*"):
        if not _alive(left):
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(dir=FOLDER, prefix=f"{PREFIX}{os.getpid()}-"))
    share_kernels(folder)
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    Finalize(None, shutil.rmtree, (folder, True), exitpriority=_AFTER_MULTIPROCESSING)
    return folder


def share_kernels(folder: Path) -> None:
    """Let MLX find its kernels in a new temporary folder: it compiles each for a second, and keeps them in such one."""
    kernels = Path(tempfile.gettempdir(), "mlx")
    kernels.mkdir(exist_ok=True)
    (folder / "mlx").symlink_to(kernels)


def _alive(folder: Path) -> bool:
    """Whether the process that made this folder still runs."""
    number = folder.name.removeprefix(PREFIX).partition("-")[0]
    if not number.isdecimal():
        return True
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True
