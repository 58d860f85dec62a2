"""What went wrong, as a user is to read it. A bug is told by its name, and a file says where it happened."""

import errno
import traceback
from datetime import UTC, datetime
from pathlib import Path

from platformdirs import user_log_path

from kvstore.errors import AmemError, NoSpaceError

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}


def expected(caught: BaseException) -> AmemError | None:
    """The failure as a user is to read it, or None for a bug."""
    if isinstance(caught, AmemError):
        return caught
    if isinstance(caught, MemoryError):
        return NoSpaceError("there is not enough memory", "use a smaller model, or end other programs")
    if isinstance(caught, OSError) and caught.strerror:
        what = f"{caught.filename}: {caught.strerror}" if caught.filename else caught.strerror
        if caught.errno in _NO_SPACE:
            return NoSpaceError(what, "make room on that disk, and do it again")
        return AmemError(what)
    return None


def bug(caught: BaseException, command: str) -> AmemError:
    """What is said of a bug in `command`, the report being written."""
    return AmemError(f"this is a bug: {type(caught).__name__}", f"the report is in {_log(caught, command)}")


def _log(caught: BaseException, command: str) -> Path | str:
    """Write where it happened into a file, and return its path. Messages and locals could hold a prompt: neither."""
    from kvstore.disk import files

    folder = user_log_path("amem")
    path = folder / f"bug-{datetime.now(UTC):%Y%m%dT%H%M%S%f}.txt"
    report = [f"amem {command}: {type(caught).__qualname__}\n"]
    report += traceback.format_tb(caught.__traceback__)
    try:
        files.make_dirs(folder)
        files.write_new(path, ["".join(report).encode()])
    except (OSError, AmemError):
        return "no file, since none could be written; -v shows the traceback"
    return path
