"""Tiny models of every kind that mlx-lm knows: the smallest config of each, and random weights of a sensible scale."""

import inspect
import json
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, cast

import mlx.core as mx
import mlx_lm.models
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten, tree_unflatten

from tests.support.configs import BASE, EXTRA, VOCABULARY
from tests.support.models import tiny_tokenizer

_LARGEST = 64 << 20  # bytes of weights


def config_of(kind: str, **more: Any) -> dict[str, Any]:
    """The config of a tiny model: what its config.json would hold."""
    own = {**BASE, "model_type": kind, **EXTRA.get(kind, {}), **more}
    if "text_config" in _fields(kind):
        return {"model_type": kind, "vocab_size": VOCABULARY, "text_config": own}
    return own


# Model files that no config alone makes a model of, and why.
NOT_BUILT = {
    "olmo": "it needs a package of its own",
    "prism_hadamard_qwen35": "it is made for one packed checkpoint",
}


def kinds() -> list[str]:
    """The names of all model files of the installed mlx-lm, but for those in NOT_BUILT."""
    names = (module.name for module in iter_modules(mlx_lm.models.__path__))
    return sorted(name for name in names if name not in NOT_BUILT and hasattr(_module(name), "ModelArgs"))


def build(kind: str, seed: int = 0, **more: Any) -> Module:
    """A tiny model with random weights, equal for equal seeds."""
    config = config_of(kind, **more)
    module = _module(kind)
    mx.random.seed(seed)
    model: Any = module.Model(module.ModelArgs.from_dict(config))
    if hasattr(model, "sanitize") and config.get("tie_word_embeddings"):
        model.sanitize({})
    parameters = cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))
    assert sum(array.nbytes for _, array in parameters) < _LARGEST, f"{kind} is not tiny: a size is missing in EXTRA"
    model.update(tree_unflatten([(name, _vary(name, array)) for name, array in parameters]))
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
    folder.mkdir(parents=True)
    model: Any = build(kind, seed, **more)
    (folder / "config.json").write_text(json.dumps(config_of(kind, **more)))
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    weights = dict(cast(list[tuple[str, mx.array]], tree_flatten(model.parameters())))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder


def _module(kind: str) -> Any:
    return import_module(f"mlx_lm.models.{kind}")


def _fields(kind: str) -> set[str]:
    return set(inspect.signature(_module(kind).ModelArgs).parameters)
