"""Every kind of model: which layer groups it has, and that what comes out of a cache is what it should be."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from amem_cli.engine.cache.latent_attention import absorb
from amem_cli.engine.cache.probe import ModelCacheSpec, describe
from amem_cli.engine.cache.slabs import SlabPool
from kvstore.errors import ModelMismatchError
from kvstore.format.codecs import CODECS, DEFAULT_CODEC
from kvstore.format.layers import stored_axes
from tests.engine.turns.test_resume import KINDS
from tests.support.models import kinds
from tools import models

PASSES = (200, 56, 70, 1, 1, 1, 12, 1, 1)  # to block's ends, on within one, and steps
SCORED = 256  # tokens from here on look back at what is quantized
CLOSE = 0.06  # nats per token: what 8 bits may cost on random weights, experts that change their minds included

Run = Callable[[list[int]], mx.array]


def log_probabilities(model: Any, tokens: list[int], caches: Any, settle: Callable[[int, mx.array], None]) -> mx.array:
    """[tokens, vocabulary], fed in the same passes whatever the cache."""
    at, parts = 0, []
    for length in PASSES:
        logits = model(mx.array([tokens[at : at + length]]), cache=caches)[0].astype(mx.float32)
        out = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        settle(length, out)
        at += length
        parts.append(out)
    return mx.concatenate(parts)


def divergences(model: Module, spec: ModelCacheSpec, *codecs: str) -> list[float]:
    """KL to mlx-lm's own caches, in nats per token, of each codec."""
    tokens = np.random.default_rng(3).integers(3, 300, sum(PASSES)).tolist()
    own = make_prompt_cache(model)
    expected = log_probabilities(model, tokens, own, lambda _, out: mx.eval(out, [cache.state for cache in own]))
    assert np.array(expected).std(axis=-1).min() > 0.1, "logits that hardly vary would show nothing"
    found = []
    for codec in codecs:
        cache = spec.new_cache(CODECS[codec], SlabPool())
        out = log_probabilities(model, tokens, cache.layers, cache.settle)
        divergence = mx.sum(mx.exp(expected) * (expected - out), axis=-1)[SCORED:].mean().item()
        assert isinstance(divergence, float)
        found.append(divergence)
    return found


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_eight_bits_are_close_and_four_are_looser(kind: str) -> None:
    model = kinds.build(kind)
    absorb(model)  # as `load` does
    spec = describe(model)
    eight, four = divergences(model, spec, "q8-channel", DEFAULT_CODEC)
    if all(group.kind == "recurrent" for group in spec.groups):
        assert eight == four == 0  # states are never quantized
    else:
        limit = 5 * CLOSE if kind == "deepseek_v32" else CLOSE  # its indexer picks other tokens
        assert eight < four / 2 and eight < limit


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("codec", ["q8-channel", "q8-token"])
def test_head_dims(head_dim: int, codec: str) -> None:
    model = kinds.build("llama", head_dim=head_dim)
    spec = describe(model)
    assert [(group.key_dim, group.value_dim) for group in spec.groups] == [(head_dim, head_dim)]
    (divergence,) = divergences(model, spec, codec)
    assert divergence < 0.01


def test_sinks_take_their_share() -> None:
    """Without its sinks the same model says something else, so they are honoured in decode, too."""
    model: Any = kinds.build("gpt_oss")
    spec = describe(model)
    with_sinks = divergences(model, spec, "q8-channel")[0]
    cache = spec.new_cache(CODECS["q8-channel"], SlabPool())
    model(mx.array([[5, 9, 7]]), cache=cache.layers)
    cache.settle(3)
    mx.eval(before := model(mx.array([[8]]), cache=cache.layers))
    cache.forget()
    for layer in model.model.layers:
        layer.self_attn.sinks = layer.self_attn.sinks + 20
    after = model(mx.array([[8]]), cache=cache.layers)
    assert with_sinks < CLOSE and np.abs(np.array(after - before)).max() > 0.1


def groups(kind: str, **more: Any) -> list[tuple[str, int]]:
    """Kind and number of layers of each group."""
    return [(group.kind, len(group.layers)) for group in describe(kinds.build(kind, **more)).groups]


def test_layers_that_share_keys_have_none_of_their_own() -> None:
    assert groups("gemma3n") == groups("gemma4_text") == [("window", 2), ("full", 2)]  # of six layers


def test_states_beside_keys() -> None:
    assert groups("mamba2") == [("recurrent", 4)]
    assert groups("qwen3_next") == [("recurrent", 3), ("full", 1)]
    assert groups("falcon_h1") == [("recurrent", 4), ("full", 4)]  # both in each layer
    assert groups("recurrent_gemma") == [("recurrent", 2), ("window", 2)]
    assert groups("baichuan_m1") == [("recurrent", 4), ("window", 2), ("full", 2)]


def test_a_cache_that_no_layer_uses_is_in_no_group() -> None:
    """One of the layers has a linear map where others attend, and mlx-lm makes a cache for it all the same."""
    spec = describe(kinds.build("nemotron-nas"))
    (group,) = spec.groups
    assert group.layers == (0, 2) and len(spec.lists) == 3


def test_latents_are_quantized_along_the_tokens() -> None:
    (group,) = describe(kinds.build("deepseek_v3")).groups
    assert (group.kv_heads, group.key_dim, group.value_dim, group.latent) == (1, 128, 64, True)
    assert stored_axes(group, CODECS["q4-channel"]) == ("token", "token")


def test_latents_that_an_indexer_chooses_from_are_read_as_arrays() -> None:
    """It chooses once the text is longer than what it lets a query see, so a short probe would not show it."""
    model: Any = kinds.build("deepseek_v32", index_topk=2048)
    spec = describe(model)
    latent, indexer = spec.groups
    assert latent.latent and not indexer.latent
    assert spec.arrays_only.issuperset((*latent.layers, *indexer.layers))


def test_keys_and_values_of_different_sizes_are_no_latents() -> None:
    (group,) = describe(kinds.build("deepseek_v2")).groups
    assert (group.kv_heads, group.key_dim, group.value_dim, group.latent) == (4, 128, 64, False)


@pytest.mark.parametrize(
    ("kind", "computed"),
    [("llama", False), ("gpt_oss", False), ("mixtral", False), ("gemma2", True), ("deepseek_v3", False), ("phi", True)],
)
def test_who_computes_on_the_keys(kind: str, computed: bool) -> None:
    spec = describe(kinds.build(kind))
    assert spec.arrays_only == (frozenset(range(4)) if computed else frozenset())


@pytest.mark.parametrize(
    ("kind", "why"), [("deepseek_v41", "keeps its state in a LayerCache"), ("longcat_flash_ngram", "state of .*int64")]
)
def test_what_is_not_served_is_refused(kind: str, why: str) -> None:
    with pytest.raises(ModelMismatchError, match=why):
        describe(kinds.build(kind))


def test_a_model_that_cannot_run_says_so() -> None:
    model: Any = kinds.build("llama")
    del model.model.layers[2].mlp
    with pytest.raises(ModelMismatchError, match="does not run here"):
        describe(model)


@pytest.mark.slow
def test_every_model_file_resumes_exactly_and_the_page_says_how() -> None:
    assert models.page(models.survey()) == models.PAGE.read_text("utf-8"), "run `python -m tools.models`"
