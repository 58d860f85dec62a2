"""The bytes of a whole state never change: blocks, tail, pages and manifest of fixed content have fixed digests."""

import hashlib

import pytest

from kvstore.format.document import replace
from kvstore.format.manifest import encode
from kvstore.format.records import Domain
from kvstore.store import Store
from tests.support.making import put_state

MADE = "2026-01-01T00:00:00Z"
DOMAIN = Domain("d" * 32, None, "5" * 64, MADE)
DIGESTS = {
    1: "a52a336bdf74104414a7e0effd08e3e72c73adfa2f4accff6116bf75eb4581ec",
    64: "8e45ed13f38e489b165966f6cbecfd7d383aefb69c8c35e0cf02f31e8d413131",
    257: "fac0dcc4fd38dea733a4607633de0c018aabc70ec9ea150d294bdf13f1f3ba47",
    1000: "85f95413d9fb256a516772d4d39c48beca990bd0d7a5fe660828407a1b9bfabf",
    5000: "0727fa7463d4139f64845da4e9607827602cf18636e69edbbd6125b6a291d8c9",
}
"""By number of tokens: the SHA-256 of the manifest, which names all other files by their digests."""


@pytest.mark.parametrize("tokens", DIGESTS)
def test_a_state_has_the_bytes_that_it_always_had(store: Store, tokens: int) -> None:
    with store.transaction(DOMAIN) as txn:
        manifest = put_state(txn, "a" * 32, None, range(tokens))
    assert hashlib.sha256(encode(replace(manifest, created=MADE))).hexdigest() == DIGESTS[tokens]
