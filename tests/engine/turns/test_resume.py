"""A resumed run is the run that was never interrupted, bit for bit."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.models import kinds
from tests.support.models.chat import tiny_model
from tests.support.running import children

pytestmark = pytest.mark.long

LENGTHS = [1, 63, 64, 65, 255, 256, 257, 600]

# One of each way to keep a state, and of each way to look at it.
KINDS = {
    "llama": "full attention",
    "qwen2": "biases on queries, keys and values",
    "qwen3": "normed queries and keys",
    "phi3": "a head dim that 64 does not divide",
    "gemma2": "capped scores: plain arrays in decode",
    "gemma3_text": "windows",
    "gemma3n": "windows, and layers that share keys by asking a cache",
    "gemma4_text": "windows, and layers that share keys by handing them on",
    "cohere2": "windows without positions in full layers",
    "gpt_oss": "attention sinks",
    "mixtral": "experts",
    "qwen3_moe": "experts and normed keys",
    "deepseek_v2": "latents that mlx-lm caches expanded",
    "minicpm3": "keys and values of different sizes",
    "deepseek_v3": "latents",
    "deepseek_v32": "latents, and an indexer's keys in a second cache of each layer",
    "llama4": "chunked attention",
    "llama4_text": "positions in some layers only",
    "mamba2": "states only",
    "qwen3_next": "linear attention beside full",
    "falcon_h1": "states and keys in one layer",
    "granitemoehybrid": "states, keys and experts",
    "lfm2": "short convolutions",
    "recurrent_gemma": "states and windows",
}


def run(role: str, root: Path, steps: int, lengths: Sequence[int], models: Sequence[Path]) -> dict[str, list[str]]:
    out = root.parent / f"{role}.json"
    settings = [role, str(root), str(out), str(steps), ",".join(map(str, lengths))]
    children.run(sys.executable, "-m", "tests.support.engine.resuming", *settings, *models, check=True)
    digests: dict[str, list[str]] = json.loads(out.read_text())
    return digests


def check(tmp_path: Path, steps: int, lengths: Sequence[int], models: Sequence[Path]) -> None:
    straight = run("straight", tmp_path / "a", steps, lengths, models)
    run("stop", tmp_path / "b", steps, lengths, models)
    resumed = run("resume", tmp_path / "b", steps, lengths, models)
    assert list(straight) == [f"{model.name}-{length}" for model in models for length in lengths]
    assert all(len(set(digests)) == len(digests) > steps for digests in straight.values())
    forks = {f"{model.name}-{max(lengths)}-fork": straight[f"{model.name}-{max(lengths)}"] for model in models}
    assert resumed == straight | forks


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text"])
def test_resumed_equals_uninterrupted(kind: str, tmp_path: Path) -> None:
    """Wherever it stops, and on beyond the next group of 64 tokens."""
    check(tmp_path, 70, LENGTHS, [tiny_model(kind, tmp_path / "model", seed=1)])


def test_resumed_equals_uninterrupted_for_every_kind(tmp_path: Path) -> None:
    check(tmp_path, 22, [1, 65, 256, 300], [kinds.write(kind, tmp_path / kind, seed=1) for kind in KINDS])
