"""JSON with canonical bytes, and lenient reading of small objects: lock notes, headers, certificates."""

import json
from typing import Any


def dump(values: dict[str, Any]) -> bytes:
    """Canonical bytes: sorted keys, no spaces, UTF-8, one line without its newline."""
    return json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def loads(data: bytes) -> Any:
    """The JSON value in `data`. Raises ValueError, for a lone surrogate and for deep nesting too."""
    try:
        values = json.loads(data)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if b"\\u" in data:  # an escaped lone surrogate cannot be written again
        json.dumps(values, ensure_ascii=False).encode()
    return values


def load(data: bytes) -> dict[str, Any] | None:
    """The object in `data`, or None where it holds none."""
    try:
        values = loads(data)
    except ValueError:
        return None
    return values if isinstance(values, dict) else None
