"""Manifests: what they say of their codec, and who may read them."""

import json

import pytest

from kvstore.errors import DamageError, NoStoreError
from kvstore.format.codecs import CODECS
from kvstore.format.document import replace
from kvstore.format.manifest import Manifest, decode_manifest, encode, features_of
from kvstore.store import Store
from tests.support.making import commit


@pytest.fixture
def manifest(store: Store) -> Manifest:
    commit(store, "a", range(300))
    state = store.agent("a")
    return store.manifest(state.domain, state.manifest)


@pytest.mark.parametrize("name", sorted(CODECS))
def test_reads_what_it_writes(manifest: Manifest, name: str) -> None:
    codec = CODECS[name]
    state = replace(manifest, codec=codec, features=features_of(codec))
    assert decode_manifest(encode(state)) == state


def test_a_codec_that_refines_nothing_is_written_as_before(manifest: Manifest) -> None:
    state = replace(manifest, codec=CODECS["q4-channel"], features=features_of(CODECS["q4-channel"]))
    values = json.loads(encode(state))
    assert values["codec"] == {"name": "q4-channel", "bits": 4, "key_axis": "token", "value_axis": "channel"}
    assert values["features"] == []


def test_a_codec_that_refines_is_a_feature(manifest: Manifest) -> None:
    values = json.loads(encode(manifest))
    assert (values["codec"]["refined"], values["features"]) == (64, ["refined-codes"])


@pytest.mark.parametrize("features", [["x"], ["refined-codes", "x"], "refined-codes", 1])
def test_an_unknown_feature_is_refused(manifest: Manifest, features: object) -> None:
    values = json.loads(encode(manifest)) | {"features": features}
    with pytest.raises(NoStoreError, match="another version"):
        decode_manifest(json.dumps(values).encode())


def test_a_codec_with_an_unknown_field_is_malformed(manifest: Manifest) -> None:
    values = json.loads(encode(manifest))
    values["codec"]["rotated"] = True
    with pytest.raises(DamageError, match="malformed"):
        decode_manifest(json.dumps(values).encode())
