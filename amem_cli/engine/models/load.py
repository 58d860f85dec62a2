"""Loads a model: its weights, its tokenizer, its prompt format, and its identity.

Every shell command pays for this, so the tokenizer is read by `tokenizers` alone: through transformers Gemma's takes
five times as long. On the CPU weights are cast to float32, and 4-bit ones dequantized, which MLX computes with many
times as fast; where that would not fit into memory, and on every other device, they keep their own type.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model, load_adapters, load_model
from tokenizers import Tokenizer

from amem_cli.engine.cache.latent_attention import absorb
from amem_cli.engine.models.fingerprint import identify
from amem_cli.engine.models.folder import read_config, weight_files
from amem_cli.engine.models.registry import ModelEntry
from amem_cli.engine.models.sources import materialize, memory
from amem_cli.engine.models.tokenizer import load_tokenizer, prompt_format, stop_ids
from amem_cli.engine.prompt.tokens import PromptFormat
from kvstore.errors import ModelMismatchError
from kvstore.format.manifest import ModelIdentity

_FLOAT32_SHARE = 0.7  # of the machine's memory, at most, for weights in float32
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_sequence_length")
# what loading raises for damaged or unknown files
_BROKEN = (ValueError, KeyError, TypeError, AttributeError, RuntimeError, ImportError, OSError)


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory. `context_length` is in tokens, None if the config has none."""

    model: Module
    tokenizer: Tokenizer
    config: dict[str, Any]
    identity: ModelIdentity
    prompt: PromptFormat
    context_length: int | None
    folder: Path


def load(entry: ModelEntry, cache: Path) -> LoadedModel:
    """Load the model of `entry`. `cache` is a folder for converted models and remembered digests.

    Raises NotFoundError for missing files, and ModelMismatchError for files that cannot be loaded.
    """
    folder = materialize(entry, cache)
    read_config(folder)
    weight_files(folder)
    identity = identify(folder, entry.adapter, entry.name, memory(cache))
    with _loading(folder):
        tokenizer = load_tokenizer(folder)
        model, config = _load_weights(folder, entry.adapter)
    prompt = prompt_format(folder, tokenizer, stop_ids(config))
    return LoadedModel(model, tokenizer, config, identity, prompt, _context_length(config), folder)


@contextmanager
def _loading(what: Path) -> Iterator[None]:
    """Errors of the libraries that read a model's files, as one line."""
    try:
        yield
    except _BROKEN as error:
        reason = str(error).strip().partition("\n")[0][:200] or type(error).__name__
        raise ModelMismatchError(
            f"cannot load {what}: {reason}", "the files are damaged or of an unknown kind"
        ) from error


def _load_weights(folder: Path, adapter: Path | None) -> tuple[Module, dict[str, Any]]:
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    if on_cpu:
        model, config = _open(folder, adapter)
        model.set_dtype(mx.float32)  # scales and biases too, so that dequantizing 4-bit weights loses nothing
        dequantize_model(model)
        if model_bytes(model) <= _FLOAT32_SHARE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
            return _read(model), config
    model, config = _open(folder, adapter)
    return _read(model), config


def _open(folder: Path, adapter: Path | None) -> tuple[Module, dict[str, Any]]:
    """The model with its weights still on disk: MLX reads an array when it is first needed."""
    model, config = load_model(folder, lazy=True)
    if adapter is not None:
        model = load_adapters(model, str(adapter))
        model.eval()
    return model, config


def _read(model: Module) -> Module:
    absorb(model)
    for weight in _weights(model):
        mx.eval(weight)  # one by one: only one array is in memory in both types
    return model


def model_bytes(model: Module) -> int:
    """Bytes that the weights take in memory."""
    return sum(weight.nbytes for weight in _weights(model))


def _weights(model: Any) -> list[mx.array]:
    """The arrays of a Module, whose own methods are untyped."""
    return [array for _, array in cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))]


def _context_length(config: dict[str, Any]) -> int | None:
    for values in (config, config.get("text_config") or {}):
        for key in _LENGTH_KEYS:
            if isinstance(values.get(key), int):
                return int(values[key])
    return None
