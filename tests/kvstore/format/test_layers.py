"""What depends on a layer's kind, for each of them."""

import pytest

from kvstore.format.codecs import CODECS, DEFAULT_CODEC
from kvstore.format.document import replace
from kvstore.format.layers import LAYER_KINDS, LayerGroup, block_parts, state_parts, tail_parts
from kvstore.format.parts import BLOCK_TOKENS, Part

FULL = LayerGroup("full-0", "full", (0, 1), kv_heads=1, key_dim=64, value_dim=64)
WINDOW = LayerGroup("window-1", "window", (2,), kv_heads=1, key_dim=64, value_dim=64, window=300)
RECURRENT = LayerGroup("recurrent-2", "recurrent", (3,), 0, 0, 0, states=(Part("state.0", "F32", (1, 4)),))
GROUPS: dict[str, LayerGroup] = {group.kind: group for group in (FULL, WINDOW, RECURRENT)}
CODEC = CODECS[DEFAULT_CODEC]


def test_each_kind_is_tested() -> None:
    assert GROUPS.keys() == LAYER_KINDS.keys()
    assert {name: kind.name for name, kind in LAYER_KINDS.items()} == {name: name for name in LAYER_KINDS}


@pytest.mark.parametrize(("kind", "blocks"), [("full", range(4)), ("window", range(2, 4)), ("recurrent", range(4, 4))])
def test_the_blocks_that_a_resume_needs(kind: str, blocks: range) -> None:
    assert list(GROUPS[kind].needed_blocks(4 * BLOCK_TOKENS + 5)) == list(blocks)
    assert list(GROUPS[kind].needed_blocks(0)) == []


@pytest.mark.parametrize("kind", LAYER_KINDS)
def test_what_is_stored(kind: str) -> None:
    group = GROUPS[kind]
    parts = block_parts(group, CODEC, BLOCK_TOKENS)
    assert (len(parts) > 1) == group.layer_kind.has_blocks  # token ids come first
    assert bool(state_parts(group)) == (not group.layer_kind.has_blocks)
    first = block_parts(group, CODEC, 0)
    assert (first != parts) == (kind == "full")  # the first tokens of full attention are refined
    assert all(part.name.startswith(f"{group.id}.") for part in tail_parts((group,), CODEC, 100))


@pytest.mark.parametrize("kind", LAYER_KINDS)
def test_sizes_that_no_model_has_are_unsound(kind: str) -> None:
    group = GROUPS[kind]
    assert group.layer_kind.is_sound(group)
    assert not group.layer_kind.is_sound(replace(group, layers=()))
    other = 64 if kind == "recurrent" else 0
    assert not group.layer_kind.is_sound(replace(group, key_dim=other))
    assert not group.layer_kind.is_sound(replace(group, window=None if kind == "window" else 7))
    assert not group.layer_kind.is_sound(replace(group, states=() if kind == "recurrent" else RECURRENT.states))


def test_latents_are_quantized_as_keys_are_and_join_no_decode_batch() -> None:
    latent = replace(FULL, latent=True, value_dim=32)
    assert FULL.joins_decode_batch
    assert not latent.joins_decode_batch
    [scales] = [part for part in block_parts(latent, CODEC, BLOCK_TOKENS) if part.name == "v.scales"]
    assert scales.shape == (2, 1, 32, BLOCK_TOKENS // 64)
