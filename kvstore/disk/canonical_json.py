"""Small JSON documents: refs, domains, format.json and journal lines, as canonical bytes."""

import json
from typing import Any


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
