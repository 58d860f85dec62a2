"""Kernel locks on files that are never unlinked: they end with their process, so none is ever stale.

The holder writes its process and command into the lock file, for the message of a process that waits in vain.
"""

import fcntl
import os
import time
from pathlib import Path
from types import TracebackType

from kvstore.disk import files
from kvstore.disk.canonical_json import dump, load
from kvstore.disk.clock import timestamp
from kvstore.errors import AmemError, BusyError

INTERNAL_WAIT = 60.0
"""Seconds to wait for the locks of the store, the journal and the domains: each is held for a moment only."""

_NOTE_BYTES = 512


class Lock:
    """One lock: `what` it guards, in words, and `holder`, the command that this process runs."""

    def __init__(self, path: Path, what: str, holder: str) -> None:
        self.path = path
        self._what = what
        self._holder = holder
        self._descriptor: int | None = None

    @property
    def held(self) -> bool:
        return self._descriptor is not None

    def acquire(self, shared: bool, wait: float) -> "Lock":
        """Take the lock within `wait` seconds; 0 tries once.

        Raises BusyError, which names the holder. To be used as a context manager.
        """
        descriptor = files.open_or_make(self.path)
        try:
            if not _poll(descriptor, shared, wait):
                raise self._busy(descriptor)
            self._sign(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        return self

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> "Lock":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

    def _sign(self, descriptor: int) -> None:
        try:
            note = {"pid": os.getpid(), "command": self._holder, "since": timestamp()}
            # of one length, so that one call replaces it and no reader finds half of it
            files.overwrite(descriptor, self.path, dump(note).ljust(_NOTE_BYTES))
        except AmemError:
            pass  # a full disk must not keep gc out: the note only serves a message

    def _busy(self, descriptor: int) -> BusyError:
        note = load(os.pread(descriptor, 2 * _NOTE_BYTES, 0)) or {}
        who = "another process"
        if note.keys() >= {"pid", "command", "since"}:
            who = f"process {note['pid']} ({note['command']}) since {note['since']}"
        return BusyError(f"{self._what} is held by {who}", "wait until it is done, or wait longer with --wait SECONDS")


def _try(descriptor: int, shared: bool) -> bool:
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _poll(descriptor: int, shared: bool, wait: float) -> bool:
    deadline = time.monotonic() + wait
    pause = 0.001
    while not _try(descriptor, shared):
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(pause * 1.5, 0.05)
    return True


def lock_folder(path: Path) -> int | None:
    """Lock a folder itself, at once: a descriptor to close, or None where it is held, or gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if _try(descriptor, shared=False) and _is_at(descriptor, path):
        return descriptor
    os.close(descriptor)
    return None


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the locked folder is still the one of that name: another may have removed it meanwhile."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
