"""Attention on latents says what the model's own attention on expanded keys and values says."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.quantized import quantize
from mlx_lm.models.cache import make_prompt_cache

from amem_cli.engine.cache.latent_attention import LatentAttention, absorb
from amem_cli.engine.cache.probe import describe
from amem_cli.engine.models.load import load
from amem_cli.engine.models.registry import find
from kvstore.format.codecs import CODECS
from kvstore.format.layers import bytes_per_token
from kvstore.format.layout import StoreLayout
from tests.support.models import kinds

PASSES = (200, 56, 1, 1, 5, 1)


def logits(model: Any) -> list[mx.array]:
    tokens = np.random.default_rng(1).integers(3, 300, sum(PASSES)).tolist()
    caches, at, found = make_prompt_cache(model), 0, []
    for length in PASSES:
        found.append(model(mx.array([tokens[at : at + length]]), cache=caches))
        at += length
    mx.eval(found)
    return found


def quantized(model: Any) -> Any:
    quantize(model, group_size=64, bits=4, class_predicate=lambda path, _: path.endswith("kv_b_proj"))
    return model


@pytest.mark.parametrize(
    ("kind", "more"),
    [("deepseek_v2", {}), ("deepseek_v2", {"q_lora_rank": None}), ("youtu_llm", {}), ("deepseek_v2", {"bits": 4})],
)
def test_logits_are_the_same_within_rounding(kind: str, more: dict[str, Any]) -> None:
    first, second = (kinds.build(kind, **more) for _ in range(2))
    if "bits" in more:
        first, second = quantized(first), quantized(second)
    absorb(second)
    for expected, found in zip(logits(first), logits(second), strict=True):
        assert mx.abs(found - expected).max() < 1e-3 < mx.std(expected)


def test_the_cache_holds_latents() -> None:
    model = kinds.build("deepseek_v2")
    expanded = describe(model)
    absorb(model)
    (group,) = describe(model).groups
    assert (group.kv_heads, group.key_dim, group.value_dim, group.latent) == (1, 128, 64, True)
    codec = CODECS["q4-channel"]
    assert bytes_per_token(group, codec) * 4 == bytes_per_token(expanded.groups[0], codec)


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3", "minicpm3", "mamba2"])
def test_other_attention_is_left_alone(kind: str) -> None:
    model = kinds.build(kind)
    before = describe(model)
    absorb(model)
    assert describe(model) == before


def test_an_adapter_s_map_is_left_alone() -> None:
    from mlx_lm.tuner.lora import LoRALinear

    model: Any = kinds.build("deepseek_v2")
    adapted = model.layers[1].self_attn
    adapted.kv_b_proj = LoRALinear.from_base(adapted.kv_b_proj)
    absorb(model)
    kept = [isinstance(layer.self_attn, LatentAttention) for layer in model.layers]
    assert kept == [True, False, True, True]


def test_a_model_that_is_loaded_is_on_its_latents(tmp_path: Any) -> None:
    folder = kinds.write("deepseek_v2", tmp_path / "model")
    loaded = load(find(StoreLayout(tmp_path / "store"), str(folder)), tmp_path / "cache")
    assert [group.latent for group in describe(loaded.model).groups] == [True]
