"""Tiny models of three kinds that chat: random weights of a sensible scale, and a ChatML template."""

from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np

from tests.support.models.folders import Config, new_model, parameters, write
from tests.support.models.tokenizers import CHATML, tiny_tokenizer

Kind = Literal["llama", "qwen3", "gemma3_text"]
KINDS: tuple[Kind, ...] = ("llama", "qwen3", "gemma3_text")
WINDOW = 64  # tokens that a sliding layer of the tiny gemma3_text sees

_LAYERS = {"llama": 4, "qwen3": 4, "gemma3_text": 6}
_CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 32768,
}
_EXTRA: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "qwen3": {"tie_word_embeddings": True},
    "gemma3_text": {"query_pre_attn_scalar": 64, "sliding_window": WINDOW, "sliding_window_pattern": 3},
}


def tiny_model(kind: str, folder: Path, seed: int = 0, template: str | None = CHATML) -> Path:
    """Write a model of a few layers with random float32 weights, equal for equal seeds, and return its folder.

    The tokenizer is a byte-level one of at most 512 tokens with a BOS of its own; `template` None leaves it without
    a chat template.
    """
    tokenizer = tiny_tokenizer()
    config = {
        "model_type": kind,
        "num_hidden_layers": _LAYERS[kind],
        "vocab_size": tokenizer.get_vocab_size(),
        "eos_token_id": tokenizer.token_to_id("<|endoftext|>"),
        **_CONFIG,
        **_EXTRA[kind],
    }
    settings = {"bos_token": "<|bos|>", "eos_token": "<|endoftext|>"}
    if template is not None:
        settings["chat_template"] = template
    return write(folder, config, _weights(config, seed), tokenizer, settings)


def _weights(config: Config, seed: int) -> dict[str, mx.array]:
    """Weights of every parameter that mlx-lm's own class has, scaled so that logits and attention vary."""
    model, gemma = new_model(config), config["model_type"] == "gemma3_text"
    if gemma:
        model.sanitize({})  # drops the head that it ties to the embedding
    random, weights = np.random.default_rng(seed), {}
    for name, shape in sorted((name, array.shape) for name, array in parameters(model).items()):
        if len(shape) == 1:  # norms: near one, and Gemma's near zero, since it adds one
            values = random.normal(0.0 if gemma else 1.0, 0.1, shape)
        else:
            values = random.normal(0.0, 1.5 * shape[-1] ** -0.5, shape)
        weights[name] = mx.array(values.astype(np.float32))
    return weights
