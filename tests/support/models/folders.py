"""The one maker of tiny models: a folder as mlx-lm loads it."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten
from tokenizers import Tokenizer

Config = dict[str, Any]


def write(
    folder: Path,
    config: Config,
    weights: dict[str, mx.array],
    tokenizer: Tokenizer,
    settings: dict[str, str] | None = None,
) -> Path:
    """Write a model into `folder`, which is made if need be, and return that.

    `settings` is what tokenizer_config.json holds; without them the model has no chat template.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer.save(str(folder / "tokenizer.json"))
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder


def module_of(kind: str) -> Any:
    """mlx-lm's module of a `model_type`."""
    return import_module(f"mlx_lm.models.{kind}")


def new_model(config: Config) -> Any:
    """The model of a config, as mlx-lm's own class makes it."""
    module = module_of(config["model_type"])
    return module.Model(module.ModelArgs.from_dict(config))


def parameters(model: Any) -> dict[str, mx.array]:
    """All weights of a model by name."""
    return dict(cast(list[tuple[str, mx.array]], tree_flatten(model.parameters())))
