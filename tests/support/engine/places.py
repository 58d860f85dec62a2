"""A store with engines on it, as the tests of turns use it."""

import os
import subprocess
from pathlib import Path

import mlx.core as mx

from amem_cli.engine.models.registry import find
from amem_cli.engine.turns.engine import Engine
from amem_cli.engine.turns.requests import Generation
from kvstore.commit.journal import Actor
from kvstore.format.document import replace
from kvstore.format.manifest import Manifest
from kvstore.history.resolve import State
from kvstore.naming import parse_ref
from kvstore.store import Store

SENTENCE = "The cat sat on the mat and thought of the river that runs through the city. "
SHORT = Generation(max_tokens=12)


class Place:
    """A store and engines on it, each as a new process would make it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = Store.open_or_create(root / "store", Actor.here("test", "0"))

    def engine(self, model: Path, checkpoint_seconds: float = 0.0) -> Engine:
        return Engine(self.store, find(self.store.layout, str(model)), self.root / "cache", checkpoint_seconds)

    def state(self, ref: str) -> State:
        return self.store.resolve(parse_ref(ref))

    def files(self) -> dict[Path, tuple[int, int]]:
        paths = (path for path in (self.root / "store").rglob("*") if path.is_file())
        return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in paths}


def kept(manifest: Manifest) -> Manifest:
    """What two runs of the same text must agree on."""
    return replace(manifest, agent="", domain="", salt="", created="", pages=(), window_blocks=(), tail=None)


def resident() -> int:
    """KiB of this process that are in memory, without the buffers that MLX keeps for its next passes."""
    mx.clear_cache()
    return int(subprocess.check_output(["ps", "-o", "rss=", "-p", str(os.getpid())]))
