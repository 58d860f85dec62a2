"""Tiny models, one for each way to keep a layer's state, as `make_store` needs them.

Weights are whole multiples of a step, few of them different and in bfloat16, so that an archive of them stays small.
"""

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCABULARY = 258  # the 256 bytes and two control tokens
_LEVELS = 3  # of a weight, on each side of zero
_HEAD_SCALE = 6.0  # of what makes logits: the likeliest token is to lead by more than a machine's rounding
_LAYER_SCALE = 4.0  # of what a layer adds
# norms of what a layer adds; of queries and keys, so that a query sees some tokens much better than others; and of what
# becomes logits where the embedding makes them
_RAISED = ("post_attention", "post_feedforward", "q_norm", "k_norm", "q_layernorm", "k_layernorm", "embedding_norm")
_LOWERED = ("dt_bias", "recurrent_param")  # how fast a state forgets: not within a question
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32768,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "norm_eps": 1e-6,
    "layer_norm_eps": 1e-6,
    "layer_norm_epsilon": 1e-6,
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "tie_word_embeddings": False,
    "eos_token_id": VOCABULARY - 1,
}
_LATENTS = {
    "kv_lora_rank": 64,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": 2,
    "n_routed_experts": None,
    "n_shared_experts": None,
    "first_k_dense_replace": 2,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 32,
}
_YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
_SHORT_CONVOLUTIONS = {
    "conv_bias": True,
    "conv_L_cache": 3,
    "block_dim": 64,
    "block_ff_dim": 64,
    "block_multiple_of": 64,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "full_attn_idxs": [1],
}
_STATE_SPACE = {
    "num_heads": 2,
    "head_dim": 32,
    "state_size": 16,
    "conv_kernel": 4,
    "n_groups": 1,
    "time_step_rank": 8,
    "time_step_limit": [0.001, 100.0],
    "use_conv_bias": True,
}
_BOTH_IN_A_LAYER = {
    "mamba_d_conv": 4,
    "mamba_d_head": 32,
    "mamba_d_ssm": 64,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_n_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "lm_head_multiplier": 1.0,
}

# name → model file of mlx-lm, and what its config has besides
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("llama", {}),
    "ragged": ("phi3", {"hidden_size": 96, "num_attention_heads": 1, "num_hidden_layers": 1}),
    "arrays": ("gemma2", {"attn_logit_softcapping": 20.0, "query_pre_attn_scalar": 64}),
    "windows": ("gemma3_text", {"sliding_window": 96, "sliding_window_pattern": 2, "query_pre_attn_scalar": 64}),
    "sinks": (
        "gpt_oss",
        {
            "sliding_window": 300,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_local_experts": 1,
            "num_experts_per_tok": 1,
        },
    ),
    "states": ("mamba2", _STATE_SPACE),
    "convolutions": ("lfm2", _SHORT_CONVOLUTIONS),
    "both": ("falcon_h1", _BOTH_IN_A_LAYER),
    "gates": (
        "recurrent_gemma",
        {
            "conv1d_width": 4,
            "logits_soft_cap": 300.0,
            "attention_window_size": 96,
            "block_types": ["recurrent", "attention"],
        },
    ),
    "latents": ("deepseek_v3", _LATENTS),
    "expanded": ("deepseek_v2", {**_LATENTS, "rope_scaling": _YARN}),
    "indexed": ("deepseek_v32", {**_LATENTS, "index_head_dim": 64, "index_n_heads": 2, "index_topk": 128}),
}
TEMPLATED = ("full", "convolutions")  # they have a chat template; the others go on with text


def write_models(folder: Path) -> None:
    """Write each model into a folder of its own within `folder`."""
    for seed, (name, (kind, own)) in enumerate(MODELS.items(), start=40):
        write_model(folder / name, {**_COMMON, "model_type": kind, **own}, seed, templated=name in TEMPLATED)


def write_model(folder: Path, config: dict[str, Any], seed: int, templated: bool) -> None:
    """Write config.json, tokenizer.json and model.safetensors, equal for equal seeds."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    _tokenizer().save(str(folder / "tokenizer.json"))
    if templated:
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": CHATML}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    weights = dict(_weights(config, np.random.default_rng(seed)))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})


def _tokenizer() -> Tokenizer:
    """A token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: place for place, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return tokenizer


def _weights(config: dict[str, Any], random: np.random.Generator) -> Iterator[tuple[str, mx.array]]:
    """What the model's own class has, by name, with numbers of a scale at which logits and attention vary."""
    module: Any = import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    for name, array in sorted(cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))):
        steps = mx.array(random.integers(-_LEVELS, _LEVELS + 1, array.shape).astype(np.float32) / _LEVELS)
        if array.ndim > 1:
            array = steps * (2.5 * array.shape[-1] ** -0.5 * _louder(name))
        elif mx.all(array == array[0]):  # norms and biases; what varies by itself stays
            array = array + 0.125 * steps + _moved(name)
        yield name, array.astype(mx.bfloat16)


def _moved(name: str) -> float:
    """What is added to a bias or a norm: see _RAISED and _LOWERED."""
    if any(part in name for part in _RAISED):
        return 2.0
    return -5.0 if name.endswith(_LOWERED) else 0.0


def _louder(name: str) -> float:
    """By how much a weight is larger than others: logits are to vary, and by what layers add to a token's own part."""
    if "lm_head" in name:
        return _HEAD_SCALE
    return _LAYER_SCALE if any(part in name for part in ("o_proj", "down_proj", "out_proj")) else 1.0
