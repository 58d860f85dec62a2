"""The time stamp of documents."""

from datetime import UTC, datetime


def timestamp() -> str:
    """Now, as it is written to disk: UTC, RFC 3339, to the microsecond."""
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
