from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.format.prefix_keys import prefix_chain, prefix_key

TOKENS = np.arange(256, dtype=np.int32)
FIELDS = ("salt", "model", "q4-channel", "full-0", "parent")


def key_of(fields: Sequence[str], tokens: NDArray[np.int32] = TOKENS) -> str:
    salt, model, codec, group, parent = fields
    return prefix_key(salt, model, codec, group, parent, tokens)


def test_every_field_changes_the_key() -> None:
    keys = {key_of(FIELDS), key_of(FIELDS, TOKENS + 1)}
    for place in range(len(FIELDS)):
        changed = [*FIELDS]
        changed[place] += "x"
        keys.add(key_of(changed))
    assert len(keys) == 7


def test_fields_are_framed() -> None:
    assert prefix_key("ab", "c", "", "", "", TOKENS) != prefix_key("a", "bc", "", "", "", TOKENS)


@pytest.mark.parametrize(("count", "keys"), [(0, 0), (255, 0), (256, 1), (1000, 3)])
def test_a_chain_covers_full_blocks(count: int, keys: int) -> None:
    tokens = np.arange(count, dtype=np.int32)
    assert len(list(prefix_chain("s", "m", "c", "g", tokens))) == keys


def test_a_chain_parts_where_tokens_part() -> None:
    tokens = np.arange(1024, dtype=np.int32)
    other = tokens.copy()
    other[300] = 0
    pairs = zip(prefix_chain("s", "m", "c", "g", tokens), prefix_chain("s", "m", "c", "g", other), strict=True)
    assert [a == b for a, b in pairs] == [True, False, False, False]


def test_the_key_does_not_depend_on_the_arrays_layout() -> None:
    wide = np.arange(512, dtype=np.int64)[::2]
    assert key_of(FIELDS, wide.astype(np.int32)) == key_of(FIELDS, np.arange(0, 512, 2, dtype=np.int32))
