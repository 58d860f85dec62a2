"""The SHA-256 of a file, read in pieces."""

import hashlib
import os
from pathlib import Path

from kvstore.disk import files

_PIECE = 1 << 20  # bytes


def sha256_of(path: Path) -> str:
    """In hex. Raises as `files.reading` does."""
    hasher = hashlib.sha256()
    with files.reading(path) as (descriptor, _):
        while piece := os.read(descriptor, _PIECE):
            hasher.update(piece)
    return hasher.hexdigest()
