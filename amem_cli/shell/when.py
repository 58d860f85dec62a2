"""Points in time as users write them: RFC 3339, or an age such as 2h."""

import re
from datetime import UTC, datetime, timedelta

from kvstore.errors import UsageError

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_AGE = re.compile(r"(\d{1,6})([smhdw])")


def parse_age(text: str) -> timedelta:
    """`90s`, `30m`, `12h`, `7d` or `2w`. Raises UsageError."""
    match = _AGE.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} is not an age", "write a number and s, m, h, d or w, as in 12h")
    return timedelta(**{_UNITS[match[2]]: int(match[1])})


def parse_time(text: str) -> datetime:
    """An RFC 3339 time (local where it has no offset), or that long ago. Raises UsageError."""
    try:
        return datetime.fromisoformat(text).astimezone()
    except ValueError:
        pass
    if not _AGE.fullmatch(text):
        raise UsageError(f"{text!r} is not a time", "write 2026-01-31T12:00:00Z, or an age such as 2h")
    try:
        return datetime.now(UTC) - parse_age(text)
    except OverflowError as error:
        raise UsageError(f"{text!r} is before all time") from error
