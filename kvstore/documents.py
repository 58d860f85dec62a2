"""Small JSON documents: refs, domains, format.json and journal lines, as canonical bytes."""

import json
from datetime import UTC, datetime
from typing import Any


def timestamp() -> str:
    """Now, as it stands on disk: UTC, RFC 3339, to the microsecond."""
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def dump(values: dict[str, Any]) -> bytes:
    """Canonical bytes: sorted keys, no spaces, UTF-8, one line without its newline."""
    return json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def load(data: bytes) -> dict[str, Any] | None:
    """The object that `data` holds, or None where it holds none."""
    try:
        values = json.loads(data)
    except ValueError:
        return None
    return values if isinstance(values, dict) else None
