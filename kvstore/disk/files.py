"""The only module that changes the file system, so that every change can be failed at and killed at.

Folders are made 0700 and files 0600 (blocks 0400). A write that fails leaves no file behind. On macOS an fsync does
not reach the disk: data gets a write barrier there, and what moves a ref (`full`) a full flush.
"""

import errno
import fcntl
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvstore.errors import AmemError, DamageError, NoSpaceError

Buffer = bytes | memoryview

fault: Callable[[str, Path], None] | None = None
"""Called with the step and the path before every change, and once more in the middle of a write. Raises or kills."""

_F_BARRIERFSYNC = 85  # macOS; Python does not name it
_MAX_BUFFERS = 512  # below every system's IOV_MAX


def explain(error: OSError, step: str, path: Path) -> AmemError:
    """The error that the user sees when `step` on `path` failed with `error`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpaceError(f"no space left to {step} {path}", "free some space, or run `amem gc`")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return AmemError(f"not allowed to {step} {path}: {error.strerror}", "check who owns the store, and its mount")
    return AmemError(f"could not {step} {path}: {error.strerror}", "check the disk that holds the store")


def announce(step: str, path: Path) -> None:
    """Say that `path` is about to change. SQLite writes its own file, so the index calls this itself."""
    if fault is not None:
        fault(step, path)


@contextmanager
def _change(step: str, path: Path) -> Iterator[None]:
    try:
        announce(step, path)
        yield
    except OSError as error:
        raise explain(error, step, path) from error


def _flush(descriptor: int, path: Path, full: bool) -> None:
    announce("flush", path)
    if sys.platform == "darwin":
        try:
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC if full else _F_BARRIERFSYNC)
            return
        except OSError as error:  # some file systems have neither
            if error.errno not in (errno.ENOTSUP, errno.EINVAL):
                raise
    os.fsync(descriptor)


def _write(descriptor: int, buffers: Sequence[Buffer]) -> None:
    views = [view for buffer in buffers if len(view := memoryview(buffer).cast("B"))]
    while views:
        written = os.writev(descriptor, views[:_MAX_BUFFERS])
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if written:
            views[0] = views[0][written:]


def _halves(buffers: Sequence[Buffer]) -> tuple[list[Buffer], list[Buffer]]:
    first: list[Buffer] = []
    second: list[Buffer] = []
    room = sum(memoryview(buffer).nbytes for buffer in buffers) // 2
    for buffer in buffers:
        if not memoryview(buffer).nbytes:  # an empty one cannot be cast
            continue
        view = memoryview(buffer).cast("B")
        first.append(view[:room])
        second.append(view[room:])
        room -= min(room, len(view))
    return first, second


def _write_and_flush(descriptor: int, path: Path, buffers: Sequence[Buffer], full: bool) -> None:
    first, second = _halves(buffers)
    _write(descriptor, first)
    announce("write", path)
    _write(descriptor, second)
    _flush(descriptor, path, full)


def make_dir(path: Path) -> None:
    """Make one folder, unless it is there. Its parent is not flushed."""
    if path.is_dir():
        return
    with _change("make", path):
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:  # another process was faster
            if not path.is_dir():
                raise


def make_dirs(path: Path) -> None:
    """Make a folder and what is missing above it, and flush the parent of each that is new."""
    if path.is_dir():
        return
    make_dirs(path.parent)
    make_dir(path)
    sync_dir(path.parent)


def sync_dir(path: Path, full: bool = False) -> None:
    """Flush a folder's entries."""
    with _change("sync", path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            _flush(descriptor, path, full)
        finally:
            os.close(descriptor)


def write_new(path: Path, buffers: Sequence[Buffer], mode: int = 0o600, full: bool = False) -> None:
    """Write and flush a file that is not there yet; its folder is not flushed."""
    with _change("write", path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            _write_and_flush(descriptor, path, buffers, full)
        except BaseException:
            path.unlink()
            raise
        finally:
            os.close(descriptor)


def write_pieces(path: Path, pieces: Iterable[Buffer]) -> None:
    """Write and flush a file that is not there yet, piece by piece; its folder is not flushed."""
    with _change("write", path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            for piece in pieces:
                _write(descriptor, [piece])
            announce("write", path)
            _flush(descriptor, path, full=True)
        except BaseException:
            path.unlink()
            raise
        finally:
            os.close(descriptor)


def replace(source: Path, target: Path) -> None:
    """Move a file into place, over whatever has that name. The folder is not flushed."""
    with _change("replace", target):
        source.replace(target)


def publish(path: Path, data: bytes, temporary: Path) -> None:
    """Put a small file into place in one step, flushed fully before and after. `temporary` must be the caller's own."""
    unlink(temporary)
    write_new(temporary, [data], full=True)
    try:
        replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_dir(path.parent, full=True)


def append(path: Path, data: bytes, flush: bool = True) -> None:
    """Add to the end of a file, making it if need be. On failure the file is as long as before."""
    with _change("append to", path):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            before = os.fstat(descriptor).st_size
            try:
                if flush:
                    _write_and_flush(descriptor, path, [data], full=True)
                else:
                    _write(descriptor, [data])
            except BaseException:
                os.ftruncate(descriptor, before)
                raise
        finally:
            os.close(descriptor)


def truncate(path: Path, size: int) -> None:
    """Cut a file down to `size` bytes and flush it."""
    with _change("truncate", path):
        descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
        try:
            os.ftruncate(descriptor, size)
            _flush(descriptor, path, full=True)
        finally:
            os.close(descriptor)


def unlink(path: Path) -> None:
    """Remove a file, if it is there."""
    if os.path.lexists(path):
        with _change("unlink", path):
            path.unlink(missing_ok=True)


def remove_folder(path: Path) -> None:
    """Remove a folder of files."""
    for child in path.iterdir():
        unlink(child)
    with _change("remove", path):
        path.rmdir()


def open_or_make(path: Path) -> int:
    """A descriptor for reading and writing a file, which is made empty if need be."""
    with _change("open", path):
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)


def overwrite(descriptor: int, path: Path, data: bytes) -> None:
    """Replace the content of an open lock file. Not flushed: it matters only while its writer lives."""
    with _change("write", path):
        os.pwrite(descriptor, data, 0)
        os.ftruncate(descriptor, len(data))


@contextmanager
def reading(path: Path) -> Iterator[tuple[int, int]]:
    """A descriptor of a regular file, and its size in bytes. Never follows a link and never waits for a FIFO.

    Raises FileNotFoundError, DamageError for anything but a regular file, AmemError where it cannot be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except NotADirectoryError as error:
        raise FileNotFoundError(error.errno, error.strerror, str(path)) from error
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise DamageError(f"{path} is not a regular file", "run `amem verify`") from error
        raise explain(error, "read", path) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise DamageError(f"{path} is not a regular file", "run `amem verify`")
        yield descriptor, status.st_size
    except OSError as error:
        raise explain(error, "read", path) from error
    finally:
        os.close(descriptor)


def read(path: Path) -> bytes:
    """All of a regular file. Raises as `reading` does."""
    with reading(path) as (descriptor, size):
        chunks = []
        while chunk := os.read(descriptor, size + 1):
            chunks.append(chunk)
        return b"".join(chunks)
