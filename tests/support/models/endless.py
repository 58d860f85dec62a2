"""A llama of two layers that never ends an answer by itself."""

from pathlib import Path

import mlx.core as mx

from tests.support.models.folders import new_model, parameters, write
from tests.support.models.tokenizers import PLAIN_CHATML, byte_tokenizer

_CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "vocab_size": 258,
    "max_position_embeddings": 200_000,
    "tie_word_embeddings": False,
    "eos_token_id": 257,
}


def endless_model(folder: Path) -> Path:
    """Write the model into `folder`, and return that. Its tokens are bytes, and it never says a control token."""
    mx.random.seed(1)
    old = parameters(new_model(_CONFIG))
    weights = {name: mx.random.normal(array.shape) * 0.3 if array.ndim > 1 else array for name, array in old.items()}
    weights["lm_head.weight"][256:] = 0
    # every other byte is one of ASCII's letters' neighbours, so that pieces of answers are printable at once
    weights["lm_head.weight"][:32] = 0
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": PLAIN_CHATML,
    }
    return write(folder, _CONFIG, weights, byte_tokenizer(), settings)
