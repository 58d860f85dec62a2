"""Tiny models of every kind that mlx-lm knows: the smallest config of each, and random weights of a sensible scale.

One config serves nearly all: model files take from it what they know. What a file needs besides stands in EXTRA.
"""

import inspect
import json
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, cast

import mlx.core as mx
import mlx_lm.models
import numpy as np
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten, tree_unflatten

from tests.models import tiny_tokenizer

WINDOW = 96  # tokens that a sliding layer sees: less than a block, and no multiple of a group
_LAYERS = 4
_VOCABULARY = 320

_ATTENTION = {
    "hidden_size": 64,
    "num_hidden_layers": _LAYERS,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": _VOCABULARY,
    "max_position_embeddings": 32768,
    "rope_theta": 10000.0,
    "sliding_window": WINDOW,
    "rms_norm_eps": 1e-6,
    "norm_eps": 1e-6,
    "layer_norm_eps": 1e-6,
    "layer_norm_epsilon": 1e-6,
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "tie_word_embeddings": False,
    "partial_rotary_factor": 0.5,
    "use_qk_norm": True,
    "embedding_multiplier": 1.0,
    "attention_multiplier": 0.125,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
_EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "top_k_experts": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "num_shared_expert": 1,
    "moe_intermediate_size": 64,
    "shared_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_LATENTS = {
    "kv_lora_rank": 64,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
}
_RECURRENT = {
    "conv_kernel": 4,
    "conv_bias": True,
    "conv_L_cache": 3,
    "use_conv_bias": True,
    "state_size": 16,
    "ssm_state_size": 32,
    "n_groups": 1,
    "time_step_rank": 8,
    "time_step_limit": [0.001, 100.0],
    "num_heads": 4,
    "mamba_n_heads": 4,
    "mamba_num_heads": 4,
    "mamba_d_head": 32,
    "mamba_head_dim": 32,
    "mamba_d_ssm": 128,
    "mamba_d_state": 32,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_proj_bias": False,
    "mamba_conv_bias": True,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
BASE: dict[str, Any] = {**_ATTENTION, **_EXPERTS, **_LATENTS, **_RECURRENT}

_MIXED = ["sliding_attention", "full_attention"] * (_LAYERS // 2)
_YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
_GPT = {"n_embd": 64, "n_head": 4, "n_layer": _LAYERS, "n_positions": 4096, "n_ctx": 4096, "n_inner": 128}

# What a model file needs besides, or instead. `text`: the config of its language model stands in `text_config`.
EXTRA: dict[str, dict[str, Any]] = {
}


def config_of(kind: str, **more: Any) -> dict[str, Any]:
    """The config of a tiny model: what its config.json would hold."""
    own = {**BASE, "model_type": kind, **EXTRA.get(kind, {}), **more}
    if "text_config" in _fields(kind):
        return {"model_type": kind, "vocab_size": _VOCABULARY, "text_config": own}
    return own


def kinds() -> list[str]:
    """The names of all model files of the installed mlx-lm."""
    names = (module.name for module in iter_modules(mlx_lm.models.__path__))
    return sorted(name for name in names if _is_model(name))


def build(kind: str, seed: int = 0, **more: Any) -> Module:
    """A tiny model with random weights, equal for equal seeds."""
    config = config_of(kind, **more)
    module = _module(kind)
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config))
    if hasattr(model, "sanitize") and config.get("tie_word_embeddings"):
        model.sanitize({})
    parameters = cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))
    model.update(tree_unflatten([(name, _vary(name, array)) for name, array in parameters]))
    mx.eval(model.parameters())
    return cast(Module, model)


def _vary(name: str, array: mx.array) -> mx.array:
    """Weights as the model's own class draws them are small, and what it leaves constant would hide mistakes."""
    if not mx.issubdtype(array.dtype, mx.floating):
        return array
    if array.size and mx.all(array == array.reshape(-1)[0]):
        return array + mx.random.normal(array.shape) * (0.1 if array.ndim == 1 else array.shape[-1] ** -0.5)
    return array * 2.5 if name.endswith("weight") and array.ndim > 1 else array


def write(kind: str, folder: Path, seed: int = 0, **more: Any) -> Path:
    """Write a tiny model as a folder that can be loaded; its tokenizer has no chat template."""
    folder.mkdir(parents=True)
    model = build(kind, seed, **more)
    (folder / "config.json").write_text(json.dumps(config_of(kind, **more)))
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    weights = dict(cast(list[tuple[str, mx.array]], tree_flatten(model.parameters())))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder


def _module(kind: str) -> Any:
    return import_module(f"mlx_lm.models.{kind}")


def _fields(kind: str) -> set[str]:
    return set(inspect.signature(_module(kind).ModelArgs).parameters)


def _is_model(name: str) -> bool:
    try:
        return hasattr(_module(name), "ModelArgs")
    except SystemExit:  # one file ends the process where a package that it wants is missing
        return False
