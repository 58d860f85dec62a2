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
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten, tree_unflatten

from tests.models import tiny_tokenizer

WINDOW = 96  # tokens that a sliding layer sees: less than a block, and no multiple of a group
_LAYERS = 4
_LARGEST = 64 << 20  # bytes of weights
_VOCABULARY = 384  # more than the tokenizer has

_ATTENTION = {
    "hidden_size": 256,
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
    "kv_lora_rank": 128,
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
_GPT = {"n_embd": 256, "n_head": 4, "n_layer": _LAYERS, "n_positions": 4096, "n_ctx": 4096, "n_inner": 128}

_ROPE = {
    "type": "default",
    "rope_theta": 10000.0,
    "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 128,
}
_GEMMA4 = {
    "global_head_dim": 128,
    "vocab_size_per_layer_input": _VOCABULARY,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 32,
    "sliding_window_pattern": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
}
_KDA = {
    "kda_layers": [1, 3],
    "full_attn_layers": [2, 4],
    "num_heads": 4,
    "head_dim": 32,
    "short_conv_kernel_size": 4,
}
_LONGCAT = {
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "zero_expert_num": 1,
    "ffn_hidden_size": 128,
    "expert_ffn_hidden_size": 64,
    "num_layers": 2,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}

# What a model file needs besides, or instead.
EXTRA: dict[str, dict[str, Any]] = {
    "afm7": {
        "hidden_dim": 256,
        "num_layers": 4,
        "num_kv_reuse_layers": 2,
        "num_kv_heads": 2,
        "hidden_dim_scale_factor": 1.0,
    },
    "afmoe": {"layer_types": _MIXED},
    "apertus": {"post_norm": False, "qk_norm": True},
    "baichuan_m1": {"sliding_window_layers": [0, 2], "conv_window": 2},
    "bailing_hybrid": {"layer_group_size": 2, "group_norm_size": 1},
    "bailing_moe_linear": {"layer_group_size": 2, "group_norm_size": 1},
    "bailing_moe_v3": {"layer_group_size": 2, "group_norm_size": 1, "moe_shared_expert_intermediate_size": 64},
    "dbrx": {
        "d_model": 256,
        "n_layers": 4,
        "n_heads": 4,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"rope_scaling": _YARN},
    "deepseek_v32": {"index_head_dim": 64, "index_n_heads": 4, "index_topk": 128},
    "exaone": {"num_layers": 4},
    "exaone4": {"rope_scaling": None, "sliding_window_pattern": "LG"},
    "exaone_moe": {"layer_types": _MIXED, "is_moe_layer": [False, True, True, True]},
    "gear": {"layer_types": ["conv_mixer", "sliding_attention", "conv_mixer", "full_attention"]},
    "gemma3": {"sliding_window_pattern": 2, "query_pre_attn_scalar": 64},
    "gemma3_text": {"sliding_window_pattern": 2, "query_pre_attn_scalar": 64},
    "gemma3n": {
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": _VOCABULARY,
        "rope_local_base_freq": 10000.0,
        "final_logit_softcapping": 30.0,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0, 0.0, 0.0],
        "hidden_size_per_layer_input": 32,
        "altup_num_inputs": 2,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "altup_active_idx": 0,
        "laurel_rank": 16,
    },
    "gemma4": {"num_hidden_layers": 6, **_GEMMA4},
    "gemma4_text": {"num_hidden_layers": 6, **_GEMMA4},
    "glm4_moe": {"rope_scaling": None},
    "glm_moe_dsa": {
        "index_head_dim": 64,
        "index_n_heads": 4,
        "index_topk": 128,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "rope_parameters": {"rope_theta": 10000.0},
    },
    "gpt2": _GPT,
    "gpt_bigcode": _GPT,
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.25},
    "gpt_oss": {"layer_types": _MIXED},
    "gptj": {**_GPT, "rotary_dim": 32},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "hunyuan": {
        "use_mixed_mlp_moe": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
    },
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
    },
    "kimi_k3": {"linear_attn_config": _KDA},
    "kimi_linear": {"linear_attn_config": _KDA, "model_max_length": 32768},
    "laguna": {"layer_types": _MIXED},
    "lfm2": {
        "block_dim": 256,
        "block_multiple_of": 64,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
        "full_attn_idxs": [1, 3],
    },
    "lfm2-vl": {
        "block_dim": 256,
        "block_multiple_of": 64,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
        "full_attn_idxs": [1, 3],
    },
    "lfm2_moe": {"use_expert_bias": True, "num_dense_layers": 1, "full_attn_idxs": [1, 3]},
    "lille-130m": {**_GPT, "n_kv_heads": 2, "block_size": 4096},
    "llama4": {
        "attention_chunk_size": 128,
        "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 128,
        "rope_scaling": None,
        "num_experts_per_tok": 1,
    },
    "llama4_text": {"intermediate_size_mlp": 128, "no_rope_layers": [1, 1, 1, 0]},
    "longcat_flash": _LONGCAT,
    "longcat_flash_ngram": _LONGCAT,
    "mellum": {
        "layer_types": _MIXED,
        "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE},
    },
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [1, 0, 1, 0],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": WINDOW,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "layernorm_epsilon": 1e-6,
        "moe_layer_freq": [0, 1, 1, 1],
        "swa_rope_theta": 10000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 1,
        "swa_head_dim": 128,
        "swa_v_head_dim": 64,
    },
    "minicpm": {"dim_model_base": 256, "scale_depth": 1.4, "scale_emb": 1.0},
    "minicpm3": {"dim_model_base": 256, "scale_depth": 1.4, "scale_emb": 1.0, "rope_scaling": {}},
    "minimax": {"rotary_dim": 32},
    "minimax_m3_vl": {
        "dense_intermediate_size": 128,
        "moe_layer_freq": [0, 1, 1, 1],
        "sparse_attention_config": {
            "sparse_num_index_heads": 2,
            "sparse_index_dim": 64,
            "sparse_block_size": 32,
            "sparse_topk_blocks": 2,
            "sparse_local_block": 1,
        },
    },
    "ministral3": {"layer_types": _MIXED, "rope_parameters": _ROPE},
    "mistral3": {"layer_types": _MIXED, "rope_parameters": _ROPE},
    "mistral4": {"rope_parameters": _ROPE},
    "muse_spark": {
        "post_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0},
        "layer_rope_theta": [10000.0] * 4,
        "layer_types": _MIXED,
        "final_logit_softcapping": 30.0,
        "output_multiplier": 1.0,
        "moe_hidden_size": 64,
        "num_shared_experts": 0,
    },
    "muse_glimmer": {"layer_types": _MIXED},
    "nemotron": {"hidden_act": "relu2"},
    "nemotron_h": {
        "hybrid_override_pattern": ["M", "*", "-", "M", "*", "E"],
        "moe_shared_expert_intermediate_size": 64,
    },
    "nemotron-nas": {
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"replace_with_linear": True}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"n_heads_in_group": 2}, "ffn": {"no_op": True}},
        ]
    },
    "olmo3": {"layer_types": _MIXED},
    "olmo_hybrid": {
        "linear_allow_neg_eigval": True,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "openelm": {
        "num_transformer_layers": 4,
        "model_dim": 256,
        "ffn_dim_divisor": 64,
        "num_query_heads": [4] * 4,
        "num_kv_heads": [2, 2, 1, 1],
        "ffn_multipliers": [0.5] * 4,
        "ffn_with_glu": True,
        "normalize_qk_projections": True,
        "share_input_output_layers": True,
    },
    "phi3": {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 384},
    "phi3small": {  # it has the ids of its own tokens built in
        "vocab_size": 100352,
        "hidden_size": 64,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "dense_attention_every_n_layers": 2,
        "ff_intermediate_size": 128,
        "gegelu_limit": 20.0,
        "blocksparse_block_size": 64,
        "mup_attn_multiplier": 1.0,
    },
    "phimoe": {
        "rope_scaling": {"long_factor": [1.0] * 32, "short_factor": [1.0] * 32, "long_mscale": 1.0, "short_mscale": 1.0}
    },
    "phixtral": {"num_vocab": _VOCABULARY, "model_dim": 256, "num_layers": 4},
    "plamo": {"n_shared_head": 2},
    "plamo2": {"hidden_size_per_head": 64, "mamba_num_heads": 4, "attention_window_size": 4096},
    "plamo3": {"window_size": WINDOW, "sliding_window_pattern": 2},
    "qwen": {"kv_channels": 64, "num_key_value_heads": 4},
    "recurrent_gemma": {
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": WINDOW,
        "block_types": ["recurrent", "attention"],
    },
    "rwkv7": {"a_low_rank_dim": 16, "v_low_rank_dim": 16, "gate_low_rank_dim": 16, "decay_low_rank_dim": 16},
    "spark2_5": {
        "layer_types": _MIXED,
        "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE},
    },
    "stablelm": {"use_qkv_bias": True},
    "step3p5": {"moe_top_k": 2, "num_attention_groups": 2, "share_expert_dim": 64, "layer_types": _MIXED},
}


def config_of(kind: str, **more: Any) -> dict[str, Any]:
    """The config of a tiny model: what its config.json would hold."""
    own = {**BASE, "model_type": kind, **EXTRA.get(kind, {}), **more}
    if "text_config" in _fields(kind):
        return {"model_type": kind, "vocab_size": _VOCABULARY, "text_config": own}
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
