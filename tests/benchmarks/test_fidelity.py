"""The benchmark of quality, on tiny models: agents really go through disk, and it tells codecs apart."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from amem_cli.engine.models.load import LoadedModel, load
from amem_cli.engine.models.registry import find
from benchmarks import fidelity
from benchmarks.caches import Reference, StoredAgent
from benchmarks.models import new_store
from kvstore.format.codecs import CODECS
from kvstore.format.layout import StoreLayout
from tests.support.models.chat import KINDS

IDS = [n * n % 251 for n in range(384)]


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest, tiny: Callable[[str], Path], tmp_path: Path) -> LoadedModel:
    return load(find(StoreLayout(tmp_path), str(tiny(request.param))), tmp_path)


def test_what_comes_back_from_disk_scores_as_what_stayed(model: LoadedModel) -> None:
    with new_store() as store, new_store() as other:
        stayed = StoredAgent(store, model, "q4-channel", IDS)
        moved = StoredAgent(other, model, "q4-channel", IDS)
        for start in range(0, len(IDS) - 64, 64):
            expected, found = stayed.score(IDS[start : start + 64]), moved.score(IDS[start : start + 64])
            assert mx.array_equal(found, expected)
            before = set(other.layout.domains.rglob("*.safetensors"))
            moved.through_disk()
            made = set(other.layout.domains.rglob("*.safetensors")) - before
            assert made and moved.nbytes >= sum(path.stat().st_size for path in made)


def test_an_agent_s_bytes_are_those_of_its_files(model: LoadedModel) -> None:
    with new_store() as store:
        agent = StoredAgent(store, model, "q4-channel", IDS)
        agent.feed(IDS[:64])
        agent.through_disk()
        (tail,) = store.layout.domains.rglob("*.safetensors")
        assert agent.nbytes == tail.stat().st_size


def test_the_reference_is_the_model_s_own_cache(model: LoadedModel) -> None:
    reference = Reference(model)
    reference.feed(IDS[:256])
    logits = model.model(mx.array([IDS[:320]]))[0, 256:].astype(mx.float32)
    expected = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    assert mx.allclose(reference.score(IDS[256:320]), expected, atol=1e-3)


@pytest.mark.long
def test_all_ways_are_scored(tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "rows.json"
    sizes = ["--tokens", "320", "384", "--windows", "2", "--decode", "4"]
    arguments = ["--model", str(tiny("gemma3_text")), *sizes, "--json", str(results), "--no-picture"]
    monkeypatch.setattr(sys, "argv", ["fidelity", *arguments])
    fidelity.main()
    rows = json.loads(results.read_text())["rows"]
    found = {(row["way"], row["codec"]): row for row in rows}
    scored = {"windows of 512": 512, **{f"{n} in passes of 64": n for n in (320, 384)}}
    scored |= {f"decode after {n}": 4 for n in (320, 384)}
    assert len(found) == len(rows) == len(scored) * (1 + len(CODECS))
    for way, tokens in scored.items():
        ours = {codec: found[way, codec] for codec in CODECS}
        full = found[way, "full precision"]
        assert full["KL"] == 0 and full["bytes"] is None
        assert {row["tokens"] for row in (full, *ours.values())} == {tokens}
        assert 0 < ours["q8-channel"]["KL"] < ours["q4-channel"]["KL"]
        assert ours["q4-channel"]["over q4-token"] == ours["q4-channel"]["KL"] / ours["q4-token"]["KL"]
        assert 0 < ours["q4-token"]["bytes"] == ours["q4-channel"]["bytes"] < ours["q8-channel"]["bytes"]
