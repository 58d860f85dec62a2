"""The counts of the paper (arXiv 2603.04428): bytes of a token in its layout, and agents of its three models."""

from dataclasses import dataclass
from typing import Any

from kvstore.format import layers
from kvstore.format.codecs import CODECS
from kvstore.format.document import replace
from kvstore.format.layers import LayerGroup

CODEC = CODECS["q4-token"]
CONTEXT = 8192  # tokens of an agent in the counts below

# The paper's models by model type, hidden size, layers and query heads; and the bytes that its 10.2 GB stand for. Its
# sizes are MiB, called MB. A GB is 1,024 of them where Gemma's agents are counted, 1,000 for the others: no single
# reading gives all six counts (docs/reference/models.md).
_MODELS: dict[tuple[Any, ...], tuple[str, int]] = {
    ("gemma3_text", 3840, 48, 16): ("Gemma 3 12B", int(10.2 * 2**30)),
    ("deepseek_v2", 2048, 27, 16): ("DeepSeek-Coder-V2-Lite", 10_200 << 20),
    ("llama", 4096, 32, 32): ("Llama 3.1 8B", 10_200 << 20),
}


@dataclass(frozen=True)
class Published:
    """How many agents of 8,192 tokens the paper counts, in float16 and in its layout, and in how many bytes."""

    model: str
    memory: int
    fp16: int
    q4: int


def bytes_per_token(group: LayerGroup) -> float:
    """Bytes of a token in the paper's layout, which has no windows: 0.281 times those in float16."""
    return layers.bytes_per_token(replace(group, window=None), CODEC)


def published(config: dict[str, Any], context: int, fp16_bytes: int, q4_bytes: int) -> Published | None:
    """The paper's counts for this model and context, given an agent's bytes; None if the paper has none."""
    text = {**config, **(config.get("text_config") or {})}
    keys = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads")
    own = [text.get(key) for key in keys]  # of any type
    found = next((figures for model, figures in _MODELS.items() if list(model) == own), None)
    if found is None or context != CONTEXT:
        return None
    model, memory = found
    return Published(model, memory, memory // fp16_bytes, memory // q4_bytes)
