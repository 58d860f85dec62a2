"""Layer groups are found by looking at the model, and what is not served is refused before any work."""

from importlib import import_module
from typing import Any

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import KVCache, make_prompt_cache

from amem_cli.engine.cache.probe import describe
from amem_cli.engine.cache.slabs import SlabPool
from kvstore.errors import ModelMismatchError
from kvstore.format.codecs import CODECS

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "vocab_size": 128,
}


def make(kind: str, **more: Any) -> Module:
    mx.random.seed(3)
    arch = import_module(f"mlx_lm.models.{kind}")
    model: Module = arch.Model(arch.ModelArgs.from_dict({"model_type": kind, **SMALL, **more}))
    return model


def gemma3() -> Module:
    return make("gemma3_text", sliding_window=64, sliding_window_pattern=2)


def test_full_attention_is_one_group() -> None:
    spec = describe(make("llama"))
    (group,) = spec.groups
    assert (group.kind, group.layers, group.kv_heads, group.key_dim, group.window) == (
        "full",
        (0, 1, 2, 3),
        2,
        64,
        None,
    )
    assert not spec.arrays_only


def test_windows_are_a_group_of_their_own() -> None:
    window, full = describe(gemma3()).groups
    assert (window.kind, window.layers, window.window) == ("window", (0, 2), 64)
    assert (full.kind, full.layers, full.window) == ("full", (1, 3), None)
    assert window.id != full.id


def test_layers_that_compute_on_their_keys_get_arrays() -> None:
    """gemma2 caps its logits inside its own attention, so it cannot take a handle. The answer must be right."""
    model = make("gemma2", query_pre_attn_scalar=64)
    spec = describe(model)
    assert spec.arrays_only == {0, 1, 2, 3}
    cache, plain = spec.new_cache(CODECS["q8-channel"], SlabPool()), make_prompt_cache(model)
    tokens = [5, 9, 77, 3, 21]
    model(mx.array([tokens]), cache=plain)
    model(mx.array([tokens]), cache=cache.layers)
    cache.settle(5)
    expected = model(mx.array([[8]]), cache=plain)
    actual = model(mx.array([[8]]), cache=cache.layers)
    cache.settle(1, actual)
    assert mx.allclose(actual, expected, atol=2e-2)
    assert cache.offset == 6


def test_recurrent_layers_are_a_group_without_keys() -> None:
    shape = {"num_heads": 4, "state_size": 16, "conv_kernel": 4, "n_groups": 1, "time_step_rank": 8}
    flags = {"use_bias": False, "use_conv_bias": True, "tie_word_embeddings": True, "residual_in_fp32": False}
    limits = {"time_step_limit": (0.0, 100.0), "layer_norm_epsilon": 1e-5}
    (group,) = describe(make("mamba2", **shape | {"head_dim": 32}, **flags, **limits)).groups
    assert (group.kind, group.layers, group.kv_heads) == ("recurrent", (0, 1, 2, 3), 0)
    assert [part.name for part in group.states] == ["state.0", "state.1"]
    assert group.first_needed(500) == 500


class OwnCache(KVCache):  # type: ignore[misc]
    """A cache that a model file brings itself."""


def test_an_unknown_kind_of_cache_is_refused_by_name() -> None:
    model = make("llama")
    model.make_cache = lambda: [OwnCache() for _ in range(4)]
    with pytest.raises(ModelMismatchError, match="OwnCache"):
        describe(model)
