"""The reference pages, held against what amem really writes: the format by a reader of its own, JSON by its keys."""

import json
import re
import tarfile
from collections.abc import Callable
from hashlib import sha256
from itertools import chain
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from amem_cli.engine.cache.agent_cache import AgentCache
from amem_cli.engine.cache.slabs import SlabPool
from amem_cli.engine.models.registry import ModelEntry
from amem_cli.engine.persist import cache_files
from amem_cli.engine.prompt.transcript import Text
from amem_cli.engine.turns.engine import Engine
from amem_cli.engine.turns.requests import PrefillOptions
from kvstore import errors
from kvstore.archive.export import exporting, write_file
from kvstore.commit.journal import Actor
from kvstore.errors import AmemError
from kvstore.format.codecs import CODECS
from kvstore.format.kinds import OBJECT_KINDS
from kvstore.format.layers import LAYER_KINDS, LayerGroup
from kvstore.format.manifest import Manifest
from kvstore.naming import Ref
from kvstore.store import Store
from tests.support.reading import State

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
TEXT = "The cat sat on the mat and thought of the river that runs through the city. " * 27


@pytest.fixture(
    params=[*(("llama", codec) for codec in sorted(CODECS)), ("gemma3_text", "q4-channel")],
    ids="-".join,
)
def store(request: pytest.FixtureRequest, tiny: Callable[[str], Path], tmp_path: Path) -> Store:
    """A store with the agent `a`: full blocks, a tail with whole groups and recent tokens, and a token to come."""
    kind, codec = request.param
    made = Store.open_or_create(tmp_path / "store", Actor.here("test", "0"))
    folder = tiny(kind)
    engine = Engine(made, ModelEntry(kind, str(folder), "folder", folder), tmp_path / "cache")
    turn = engine.prefill("a", [Text(TEXT)], PrefillOptions(codec=codec))
    assert turn.tokens % 256 > 64 and turn.tokens % 64 > 1
    return made


def test_a_reader_written_from_the_page_reads_what_the_engine_computes_with(store: Store) -> None:
    read = State(store.layout.root, "a")
    manifest = store.resolve(Ref("a")).manifest
    tokens = store.tokens(manifest)
    assert read.tokens == tokens.tolist()
    cache = AgentCache(manifest.groups, manifest.codec, SlabPool())
    cache_files.load(store, manifest, cache, tokens).now()
    for group, described in zip(cache.with_blocks, read.manifest["groups"], strict=True):
        keys, values = read.group(described)
        if group.group.kind == "full":
            assert keys.shape[2] == values.shape[2] == manifest.cached
        for layer in range(len(group.group.layers)):
            for array, own in zip(group.past(layer, mx.float32), (keys, values), strict=True):
                engine = np.array(array)[0]
                held = own[layer, :, -engine.shape[1] :]
                np.testing.assert_allclose(held, engine, rtol=1e-5, atol=1e-5)


def test_blocks_say_what_the_page_says(store: Store) -> None:
    read = State(store.layout.root, "a")
    chains: dict[str, dict[int, str]] = {}
    for row in read.rows:
        metadata, parts = read.block(row)
        assert (int(metadata["position"]), metadata["group"]) == (row["position"], row["group"])
        assert parts["tokens"].tolist() == read.tokens[row["position"] : row["position"] + 256]
        assert read.prefix_key(row, metadata["parent_key"]) == metadata["prefix_key"] == row["prefix_key"]
        chains.setdefault(row["group"], {})[row["position"]] = row["prefix_key"]
        before = chains[row["group"]].get(row["position"] - 256)
        assert metadata["parent_key"] == before or before is None
    for group in read.manifest["groups"]:
        first = 0 if group["window"] is None else max(0, read.manifest["cached"] - group["window"] + 1) // 256 * 256
        assert sorted(chains.get(group["id"], [])) == list(range(first, read.manifest["cached"] // 256 * 256, 256))


def test_an_archive_is_the_tar_that_the_page_describes(store: Store, tmp_path: Path) -> None:
    with exporting(store, Ref("a")) as found:
        write_file(tmp_path / "a.amem", found.pieces)
    with tarfile.open(tmp_path / "a.amem") as archive:
        first, *members = archive.getmembers()
        listing = json.loads(archive.extractfile(first).read())  # type: ignore[union-attr]
        held = {member.name: archive.extractfile(member).read() for member in members}  # type: ignore[union-attr]
    own = listing.pop("sha256")
    canonical = json.dumps(listing, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    assert (first.name, own) == ("amem.json", sha256(canonical).hexdigest())
    assert [(name, len(data)) for name, data in held.items()] == [(f["path"], f["bytes"]) for f in listing["files"]]
    for name, data in held.items():
        kind, _, file = name.partition("/")
        at = store.layout.domain(listing["domain"]["id"]) / kind / file[:2] / file
        assert data == at.read_bytes()


def test_exit_codes_are_those_of_the_errors() -> None:
    kinds = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, AmemError)]
    page = (REFERENCE / "exit-codes.md").read_text("utf-8")
    told = re.findall(r"^\| (\d+) \| `([a-z-]+)` \|", page, re.M)
    assert {(int(number), code) for number, code in told} == {(kind.exit_code, kind.code) for kind in kinds}


def test_codecs_are_those_of_the_page() -> None:
    page = (REFERENCE / "format.md").read_text("utf-8")
    axis = r"along the (token|channel)s, [^|]+"
    rows = re.findall(rf"^\| `(q[^`]+)`[^|]* \| (\d)(, [^|]+)? \| {axis} \| {axis} \|$", page, re.M)
    told = {(name, int(bits), keys, values, bool(twice)) for name, bits, twice, keys, values in rows}
    assert told == {(c.name, c.bits, c.key_axis, c.value_axis, bool(c.refined)) for c in CODECS.values()}


def test_object_kinds_are_those_of_the_page() -> None:
    page = (REFERENCE / "format.md").read_text("utf-8")
    rows = re.findall(r"^\| `domains/<id>/(\w+)/<aa>/<sha256>(\.\w+)` \| [^|]+ \| (\d+) \|$", page, re.M)
    told = {(folder, suffix, int(mode, 8)) for folder, suffix, mode in rows}
    assert told == {(kind.folder, kind.suffix, kind.mode) for kind in OBJECT_KINDS}


def test_fields_of_states_and_layer_groups_are_those_of_the_page() -> None:
    manifests = (REFERENCE / "format.md").read_text("utf-8").partition("## Manifests")[2].partition("\n## ")[0]
    states, groups = manifests.split("A layer group holds")
    told = [re.findall(r"`(\w+)`", row) for row in re.findall(r"^\| (`[^|]+) \|", states, re.M)]
    assert sorted(chain(*told)) == sorted(Manifest.__struct_fields__)
    told = [re.findall(r"`(\w+)`", row) for row in re.findall(r"^\| (`[^|]+) \|", groups, re.M)]
    assert sorted(chain(*told)) == sorted(LayerGroup.__struct_fields__)
    [kinds] = re.findall(r"^\| `kind` \| ([^|]+) \|$", groups, re.M)
    assert re.findall(r"`(\w+)`", kinds) == list(LAYER_KINDS)
