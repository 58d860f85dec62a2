"""Sizes and ages as people write them: `4GiB`, `500M`, `30d`."""

import re

from kvstore.errors import UsageError

_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", re.ASCII)
_SIZES = {"": 1, "b": 1} | {
    f"{letter}{unit}": base**power
    for power, letter in enumerate("kmgtp", start=1)
    for unit, base in (("", 1000), ("b", 1000), ("i", 1024), ("ib", 1024))
}
_AGES = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def parse_size(text: str) -> int:
    """Bytes: G is 10⁹, GiB is 2³⁰. Raises UsageError."""
    return int(_parse(text, _SIZES, "a size", "write bytes, or a number and its unit: 500M, 20G, 4GiB"))


def parse_age(text: str) -> float:
    """Seconds. Raises UsageError."""
    return _parse(text, _AGES, "an age", "write a number and its unit: 45m, 12h, 30d, 2w")


def check_size(text: str | None) -> str | None:
    """Check a size while the command line is read. Raises UsageError."""
    if text is not None:
        parse_size(text)
    return text


def check_age(text: str | None) -> str | None:
    """Check an age while the command line is read. Raises UsageError."""
    if text is not None:
        parse_age(text)
    return text


def _parse(text: str, units: dict[str, int], what: str, hint: str) -> float:
    match = _NUMBER.fullmatch(text.strip())
    if match is None or match[2].lower() not in units:
        raise UsageError(f"{text!r} is not {what}", hint)
    return float(match[1]) * units[match[2].lower()]
