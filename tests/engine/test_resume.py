"""A resumed run is the run that was never interrupted, bit for bit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models import tiny_model

LENGTHS = [1, 63, 64, 65, 255, 256, 257, 600]


def run(role: str, root: Path, model: Path) -> dict[str, list[str]]:
    out = root.parent / f"{role}.json"
    command = [sys.executable, "-m", "tests.engine.resuming", role, str(root), str(model), str(out)]
    subprocess.run([*command, *map(str, LENGTHS)], check=True, timeout=300)
    digests: dict[str, list[str]] = json.loads(out.read_text())
    return digests


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text"])
def test_resumed_equals_uninterrupted(kind: str, tmp_path: Path) -> None:
    model = tiny_model(kind, tmp_path / "model", seed=1)
    straight = run("straight", tmp_path / "a", model)
    run("stop", tmp_path / "b", model)
    resumed = run("resume", tmp_path / "b", model)
    assert list(straight) == [str(n) for n in LENGTHS]
    assert all(len(set(digests)) == len(digests) > 70 for digests in straight.values())
    assert resumed == straight
