"""Tiny models of every kind that mlx-lm knows: the smallest config of each, and random weights of a sensible scale."""

import inspect
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import mlx.core as mx
import mlx_lm.models
from mlx.nn.layers.base import Module
from mlx.utils import tree_unflatten

from tests.support.models import folders
from tests.support.models.base_config import BASE, VOCABULARY
from tests.support.models.extra_configs import EXTRA
from tests.support.models.folders import Config, module_of, new_model, parameters
from tests.support.models.tokenizers import tiny_tokenizer

_LARGEST = 64 << 20  # bytes of weights
# Model files that no config alone makes a model of, and why.
NOT_BUILT = {
    "olmo": "it needs a package of its own",
    "prism_hadamard_qwen35": "it is made for one packed checkpoint",
}


def config_of(kind: str, **more: Any) -> Config:
    """The config of a tiny model: what its config.json would hold."""
    own = {**BASE, "model_type": kind, **EXTRA.get(kind, {}), **more}
    if "text_config" in inspect.signature(module_of(kind).ModelArgs).parameters:
        return {"model_type": kind, "vocab_size": VOCABULARY, "text_config": own}
    return own


def kinds() -> list[str]:
    """The names of all model files of the installed mlx-lm, but for those in NOT_BUILT."""
    names = (module.name for module in iter_modules(mlx_lm.models.__path__))
    return sorted(name for name in names if name not in NOT_BUILT and hasattr(module_of(name), "ModelArgs"))


def build(kind: str, seed: int = 0, **more: Any) -> Module:
    """A tiny model with random weights, equal for equal seeds."""
    config = config_of(kind, **more)
    mx.random.seed(seed)
    model = new_model(config)
    if hasattr(model, "sanitize") and config.get("tie_word_embeddings"):
        model.sanitize({})
    weights = parameters(model)
    size = sum(array.nbytes for array in weights.values())
    assert size < _LARGEST, f"{kind} is not tiny: a size is missing in EXTRA"
    model.update(tree_unflatten([(name, _vary(name, array)) for name, array in weights.items()]))
    mx.eval(model.parameters())
    built: Module = model
    return built


def _vary(name: str, array: mx.array) -> mx.array:
    """Weights as the model's own class draws them are small, and what it leaves constant would hide mistakes."""
    if not mx.issubdtype(array.dtype, mx.floating):
        return array
    if array.size and mx.all(array == array.reshape(-1)[0]):
        return array + mx.random.normal(array.shape) * (0.1 if array.ndim < 2 else array.shape[-1] ** -0.5)
    return array * 2.5 if name.endswith("weight") and array.ndim > 1 else array


def write(kind: str, folder: Path, seed: int = 0, **more: Any) -> Path:
    """Write a tiny model as a folder that can be loaded; its tokenizer has no chat template."""
    return folders.write(folder, config_of(kind, **more), parameters(build(kind, seed, **more)), tiny_tokenizer())
