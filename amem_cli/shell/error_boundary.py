"""Turns a caught exception into the AmemError that the user reads. For a bug it also writes a report file."""

import errno
import traceback
from datetime import UTC, datetime
from pathlib import Path

from platformdirs import user_log_path

from kvstore.errors import AmemError, NoSpaceError

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}


def to_amem_error(caught: BaseException) -> AmemError | None:
    """`caught` as an expected failure, or None if it is a bug."""
    if isinstance(caught, AmemError):
        return caught
    if isinstance(caught, MemoryError):
        return NoSpaceError("out of memory", "use a smaller model, or close other programs")
    if isinstance(caught, OSError) and caught.strerror:
        what = f"{caught.filename}: {caught.strerror}" if caught.filename else caught.strerror
        if caught.errno in _NO_SPACE:
            return NoSpaceError(what, "free some space on that disk and try again")
        return AmemError(what)
    return None


def report_bug(caught: BaseException, command: str) -> AmemError:
    """Write a bug report for `command`, and return the error that names it."""
    path = _write_report(caught, command)
    hint = f"see the report in {path}" if path else "the report could not be written; -v shows the traceback"
    return AmemError(f"this is a bug: {type(caught).__name__}", hint)


def _write_report(caught: BaseException, command: str) -> Path | None:
    """Write the stack to a file and return its path. Messages and locals are left out: they could hold a prompt."""
    from kvstore.disk import files

    folder = user_log_path("amem")
    path = folder / f"bug-{datetime.now(UTC):%Y%m%dT%H%M%S%f}.txt"
    report = [f"amem {command}: {type(caught).__qualname__}\n"]
    report += traceback.format_tb(caught.__traceback__)
    try:
        files.make_dirs(folder)
        files.write_new(path, ["".join(report).encode()])
    except (OSError, AmemError):
        return None
    return path
