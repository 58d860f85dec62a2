"""Sizes, ages and points in time: one grammar, and usage errors for everything else."""

from datetime import UTC, datetime, timedelta

import pytest

from amem_cli.shell.quantities import parse_age, parse_size, parse_time
from kvstore.errors import UsageError

AGES = [("90s", 90), ("45m", 2700), ("12h", 43200), ("1.5h", 5400), ("30d", 2_592_000), ("2w", 1_209_600)]
HUGE = "9" * 400


@pytest.mark.parametrize(("text", "age"), [*AGES, (" 2 W ", 1_209_600), ("0s", 0), ("1234567m", 74_074_020)])
def test_an_age_and_the_time_that_long_ago(text: str, age: float) -> None:
    assert parse_age(text) == age
    before = datetime.now(UTC)
    assert before <= parse_time(text) + timedelta(seconds=age) <= datetime.now(UTC)


@pytest.mark.parametrize(
    ("text", "time"),
    [
        ("2026-01-31T12:00:00Z", datetime(2026, 1, 31, 12, tzinfo=UTC)),
        ("2026-01-31T12:00:00.5+02:00", datetime(2026, 1, 31, 10, 0, 0, 500_000, tzinfo=UTC)),
        ("2026-01-31", datetime(2026, 1, 31).astimezone()),
        ("20260131", datetime(2026, 1, 31).astimezone()),
    ],
)
def test_a_point_in_time(text: str, time: datetime) -> None:
    assert parse_time(text) == time


@pytest.mark.parametrize("text", ["", "30", "h", "-1h", "1e3s", "2 fortnights", "1h30m", "yesterday", f"{HUGE}d"])
def test_no_ages(text: str) -> None:
    with pytest.raises(UsageError, match="is not an age"):
        parse_age(text)


@pytest.mark.parametrize("text", ["", "30", "yesterday", "2026-13-01", "0001-01-01T00:00:00+23:00", "9999999w"])
def test_no_times(text: str) -> None:
    with pytest.raises(UsageError, match=r"is not a time|outside the range of dates"):
        parse_time(text)


def test_a_size_beyond_all_numbers_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="is not a size"):
        parse_size(HUGE)
