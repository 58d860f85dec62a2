"""Every layer kind of the store has a cache in the engine, and one that the probe can give a long past."""

import pytest

from amem_cli.engine.cache.agent_cache import CACHES, footprint
from amem_cli.engine.cache.block_cache import BlockCache
from amem_cli.engine.cache.probe import LONG_CACHES
from amem_cli.engine.cache.slabs import SlabPool
from kvstore.format.codecs import CODECS, DEFAULT_CODEC
from kvstore.format.layers import LAYER_KINDS, Kind, LayerGroup
from kvstore.format.parts import Part

CODEC = CODECS[DEFAULT_CODEC]
STATE = Part("state.0", "F32", (1, 3, 4))
GROUPS: dict[Kind, LayerGroup] = {
    "full": LayerGroup("full-0", "full", (0, 1), kv_heads=1, key_dim=64, value_dim=64),
    "window": LayerGroup("window-0", "window", (0, 1), kv_heads=1, key_dim=64, value_dim=64, window=300),
    "recurrent": LayerGroup("recurrent-0", "recurrent", (0, 1), 0, 0, 0, states=(STATE,)),
}


def test_each_kind_has_a_class() -> None:
    assert set(CACHES) == set(LONG_CACHES) == set(GROUPS) == set(LAYER_KINDS)


@pytest.mark.parametrize("kind", LAYER_KINDS)
def test_a_kind_with_blocks_has_a_cache_of_blocks_and_a_long_past(kind: Kind) -> None:
    assert issubclass(CACHES[kind], BlockCache) is LAYER_KINDS[kind].has_blocks
    assert issubclass(LONG_CACHES[kind], CACHES[kind])
    if LAYER_KINDS[kind].has_blocks:
        cache = LONG_CACHES[kind](GROUPS[kind], CODEC, SlabPool())
        cache.offset = 100_000
        assert isinstance(cache, BlockCache) and cache.held_blocks == 0 and not cache.slabs


@pytest.mark.parametrize("kind", LAYER_KINDS)
def test_sharing_and_memory_follow_from_the_kind(kind: Kind) -> None:
    group, traits = GROUPS[kind], LAYER_KINDS[kind]
    cache = CACHES[kind](group, CODEC, SlabPool())
    if isinstance(cache, BlockCache):
        assert bool(cache.shareable(1 << 20)) is traits.is_listed_in_pages
    grows = footprint([group], CODEC, 1 << 20) > footprint([group], CODEC, 1 << 14)
    assert grows is traits.is_listed_in_pages
