"""A model's identity: a digest of each part that changes its keys and values. No MLX, so that it is quick.

Weights are identified by content, never by name: the same folder with one weight changed is another model. Reading a
gigabyte takes a few tenths of a second, so the digest of a large file is remembered together with its `stat`. A change
in place always moves ctime, which no program can set back; a file that changed less than two seconds before it was
read is not remembered, since a second change could fall into the same tick of the clock.
"""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from xxhash import xxh3_128

from amem_cli.engine.models.folder import chat_template, read_config, tokenizer_settings, weight_files
from kvstore.disk import files
from kvstore.errors import AmemError, NotFoundError
from kvstore.format.document import Xxh128, parse
from kvstore.format.manifest import ModelIdentity

PARTS = ("weights", "config", "tokenizer", "template", "adapter")
NONE = "none"
_SETTLED_SECONDS = 2.0

# Keys about how a model was saved or when to stop, which do not change keys and values.
_CONFIG_NOISE = {
    "_name_or_path", "bos_token_id", "dtype", "eos_token_id", "pad_token_id", "torch_dtype", "transformers_version",
    "use_cache",
}  # fmt: skip
_TOKENIZER_NOISE = {"chat_template", "name_or_path", "processor_class", "tokenizer_file"}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json")

Stat = tuple[int, int, int, int, int]  # size, mtime_ns, ctime_ns, inode, device


class Digests:
    """xxh3-128 of files' content, remembered in the JSON file `memory`; without one every file is read again."""

    def __init__(self, memory: Path | None) -> None:
        self._memory = memory
        self._known: dict[str, tuple[Stat, Xxh128]] = {}
        self._changed = False
        if memory is not None:
            # the memory is only a shortcut: without it, or with a damaged one, the files are read
            with contextlib.suppress(OSError, ValueError):
                self._known = parse(memory.read_bytes(), dict[str, tuple[Stat, Xxh128]])

    def of(self, path: Path) -> str:
        """The digest of `path`, 32 hex digits. Raises NotFoundError."""
        try:
            before = _stat(path)
            known = self._known.get(str(path))
            if known and known[0] == before:
                return known[1]
            digest = _xxh3(path)
        except OSError as error:
            raise NotFoundError(f"cannot read {path}: {error.strerror}") from error
        if before == _stat(path) and time.time() - before[2] / 1e9 > _SETTLED_SECONDS:
            self._known[str(path)] = (before, digest)
            self._changed = True
        return digest

    def save(self) -> None:
        """Write the memory, if it changed. If that fails, the next start takes longer; nothing else."""
        if self._memory is None or not self._changed:
            return
        fresh = self._memory.with_name(f"{self._memory.name}.{os.getpid()}")
        with contextlib.suppress(OSError, AmemError):
            files.make_dir(self._memory.parent)
            files.write_new(fresh, [json.dumps(self._known).encode()], 0o600)
            files.replace(fresh, self._memory)
        self._changed = False


def identify(folder: Path, adapter: Path | None, name: str, memory: Path | None) -> ModelIdentity:
    """Digest every part of the model in `folder`; `memory` is the file in which digests of large files are kept.

    Raises NotFoundError for a missing file and ModelMismatchError for a broken one.
    """
    digests = Digests(memory)
    template = chat_template(folder)
    parts = {
        "weights": _files_digest(digests, weight_files(folder)),
        "config": _json_digest(_without(read_config(folder), _CONFIG_NOISE)),
        "tokenizer": _tokenizer_digest(digests, folder),
        "template": NONE if template is None else xxh3_128(template.encode()).hexdigest(),
        "adapter": NONE if adapter is None else _adapter_digest(digests, adapter),
    }
    digests.save()
    fingerprint = hashlib.sha256(_canonical(parts)).hexdigest()
    return ModelIdentity(name, fingerprint, parts)


def compare(stored: ModelIdentity, present: ModelIdentity) -> list[str]:
    """The parts that differ, in the order of PARTS; none if the keys and values of one can be used with the other."""
    return [part for part in PARTS if stored.parts.get(part) != present.parts.get(part)]


def _tokenizer_digest(digests: Digests, folder: Path) -> str:
    present = [path for name in _TOKENIZER_FILES if (path := folder / name).is_file()]
    present += sorted(folder.glob("*.tiktoken"))
    settings = _without(tokenizer_settings(folder), _TOKENIZER_NOISE)
    return _json_digest([_files_digest(digests, present), settings])


def _adapter_digest(digests: Digests, adapter: Path) -> str:
    return _files_digest(digests, [adapter / "adapter_config.json", adapter / "adapters.safetensors"])


def _files_digest(digests: Digests, paths: Iterable[Path]) -> str:
    """One digest over names and contents, each framed by its length."""
    whole = xxh3_128()
    for path in paths:
        name = path.name.encode()
        whole.update(len(name).to_bytes(8, "little") + name + bytes.fromhex(digests.of(path)))
    return whole.hexdigest()


def _xxh3(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxh3_128).hexdigest()


def _stat(path: Path) -> Stat:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev


def _without(values: dict[str, Any], noise: set[str]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in noise}


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _json_digest(value: object) -> str:
    return xxh3_128(_canonical(value)).hexdigest()
