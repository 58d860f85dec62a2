"""A llama of two layers and random weights, whose tokens are the 256 bytes and two control tokens."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIG = {
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


def make_tiny_model(folder: Path) -> Path:
    """Write the model into `folder`, and return that. It never says a control token, so its answers never end."""
    import amem_cli.engine  # noqa: F401  (chooses the BLAS, before MLX is loaded)

    import mlx.core as mx  # isort: skip
    from mlx.utils import tree_flatten  # isort: skip
    from mlx_lm.models import llama  # isort: skip

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: place for place, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": CHATML,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    mx.random.seed(1)
    shapes = dict(tree_flatten(llama.Model(llama.ModelArgs.from_dict(CONFIG)).parameters()))
    weights = {name: mx.random.normal(old.shape) * 0.3 if old.ndim > 1 else old for name, old in shapes.items()}
    weights["lm_head.weight"][256:] = 0
    # every other byte is one of ASCII's letters' neighbours, so that pieces of answers are printable at once
    weights["lm_head.weight"][:32] = 0
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder
