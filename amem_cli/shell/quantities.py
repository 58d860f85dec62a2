"""Sizes, ages and points in time as users write them: `4GiB`, `30d`, `1.5 h`, `2026-01-31T12:00:00Z`.

Every option uses this one grammar: a number and its unit, in any case, with or without spaces.
"""

import math
import re
from datetime import UTC, datetime, timedelta

from kvstore.errors import UsageError

_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", re.ASCII)
_SIZES = {"": 1, "b": 1} | {
    f"{letter}{unit}": base**power
    for power, letter in enumerate("kmgtp", start=1)
    for unit, base in (("", 1000), ("b", 1000), ("i", 1024), ("ib", 1024))
}
_AGES = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}  # without a unit an age is ambiguous
_SIZE_HINT = "write bytes, or a number and a unit: 500M, 20G, 4GiB"
_AGE_HINT = "write a number and a unit: 90s, 45m, 12h, 30d, 2w"
_TIME_HINT = "write 2026-01-31T12:00:00Z, or an age such as 2h"


def parse_size(text: str) -> int:
    """Bytes: G is 10⁹, GiB is 2³⁰. Raises UsageError."""
    size = _product(text, _SIZES)
    if size is None:
        raise UsageError(f"{text!r} is not a size", _SIZE_HINT)
    return int(size)


def parse_age(text: str) -> float:
    """Seconds. Raises UsageError."""
    age = _product(text, _AGES)
    if age is None:
        raise UsageError(f"{text!r} is not an age", _AGE_HINT)
    return age


def parse_time(text: str) -> datetime:
    """An RFC 3339 time (local if it has no offset), or an age before now. Raises UsageError."""
    age = _product(text, _AGES)
    try:
        if age is not None:
            return datetime.now(UTC) - timedelta(seconds=age)
        return datetime.fromisoformat(text).astimezone()
    except OverflowError as error:
        raise UsageError(f"{text!r} is outside the range of dates", _TIME_HINT) from error
    except ValueError as error:
        raise UsageError(f"{text!r} is not a time", _TIME_HINT) from error


def check_size(text: str | None) -> str | None:
    """Option callback: return `text` unchanged. Raises UsageError if it is not a size."""
    if text is not None:
        parse_size(text)
    return text


def check_age(text: str | None) -> str | None:
    """Option callback: return `text` unchanged. Raises UsageError if it is not an age."""
    if text is not None:
        parse_age(text)
    return text


def check_time(text: str | None) -> str | None:
    """Option callback: return `text` unchanged. Raises UsageError if it is not a time."""
    if text is not None:
        parse_time(text)
    return text


def _product(text: str, units: dict[str, int]) -> float | None:
    """The number in `text` times its unit; None if the text has another form or the product is too large."""
    match = _NUMBER.fullmatch(text.strip())
    if match is None or match[2].lower() not in units:
        return None
    product = float(match[1]) * units[match[2].lower()]
    return product if math.isfinite(product) else None
