"""Prefix keys: they find a block that was computed before from the same tokens, inside one domain.

A key chains to its parent's, so equal keys mean equal tokens from position 0 on, with the same model and codec. The
domain's salt leads, so that no key can be tested against a guessed text once the domain is erased.
"""

import hashlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvstore.format.parts import BLOCK_TOKENS


def prefix_key(
    salt: str, model_fingerprint: str, codec_name: str, group_id: str, parent_key: str, token_ids: NDArray[np.int32]
) -> str:
    """SHA-256, in hex, over the length-framed fields. `token_ids`: [256] int32; `parent_key` is "" at position 0."""
    tokens = np.ascontiguousarray(token_ids, dtype="<i4").tobytes()
    texts = (salt, model_fingerprint, codec_name, group_id, parent_key)
    hasher = hashlib.sha256()
    for field in (*(text.encode() for text in texts), tokens):
        hasher.update(len(field).to_bytes(8, "little"))
        hasher.update(field)
    return hasher.hexdigest()


def prefix_chain(
    salt: str, model_fingerprint: str, codec_name: str, group_id: str, token_ids: NDArray[np.int32]
) -> Iterator[str]:
    """The keys of all full blocks of `token_ids` ([n] int32), in order; fewer than 256 tokens at the end have none."""
    key = ""
    for start in range(0, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block = token_ids[start : start + BLOCK_TOKENS]
        key = prefix_key(salt, model_fingerprint, codec_name, group_id, key, block)
        yield key
