"""Models with recurrent layers: their states are kept at each committed state, exactly, and are valid there only."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import ArraysCache

from amem_cli.engine.cache.probe import describe
from amem_cli.engine.cache.recurrent import RecurrentCache
from amem_cli.engine.cache.slabs import SlabPool
from amem_cli.engine.prompt.transcript import Text
from amem_cli.engine.turns.repair import repair
from amem_cli.engine.turns.requests import NOBODY, ChatOptions, PrefillOptions, Watcher
from kvstore import lifecycle
from kvstore.errors import DamageError, ModelMismatchError
from kvstore.format.codecs import CODECS, DEFAULT_CODEC
from kvstore.format.kinds import TAIL
from kvstore.format.layers import LayerGroup
from kvstore.format.parts import Dtype, Part
from kvstore.gc.evict import evict
from kvstore.graph.roots import read_root
from kvstore.naming import Ref
from tests.support.engine.places import SENTENCE, SHORT, Place
from tests.support.models import kinds

RECURRENT = ["mamba2", "qwen3_next", "falcon_h1", "recurrent_gemma"]  # alone, beside full layers, in them, and windows
Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    root = tmp_path_factory.mktemp("recurrent")

    def made(kind: str) -> Path:
        return root / kind if (root / kind).exists() else kinds.write(kind, root / kind)

    return made


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_a_tail_gives_back_the_same_bits(dtype: Dtype) -> None:
    group = LayerGroup("recurrent-0", "recurrent", (0, 2), 0, 0, 0, states=(Part("state.0", dtype, (1, 3, 4)),))
    given, taken = (RecurrentCache(group, CODECS[DEFAULT_CODEC], SlabPool()) for _ in range(2))
    mlx = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}[dtype]
    for layer in given.layers:
        layer[0] = mx.random.normal((1, 6, 4)).astype(mlx)[:, 3:]
    mx.eval(given.gather())
    (tail,) = given.tail(0, 0)
    assert tail.shape == (2, 1, 3, 4) and tail.nbytes == given.nbytes
    taken.load_tail(0, 0, [tail])
    for one, other in zip(given.layers, taken.layers, strict=True):
        assert other[0].dtype == mlx and mx.array_equal(one[0], other[0])


def test_a_state_does_not_keep_what_it_was_cut_from() -> None:
    group = LayerGroup("recurrent-0", "recurrent", (0,), 0, 0, 0, states=(Part("state.0", "F32", (1, 1, 256)),))
    cache = RecurrentCache(group, CODECS[DEFAULT_CODEC], SlabPool())
    mx.clear_cache()
    before = mx.get_active_memory()
    for _ in range(8):
        cache.layers[0][0] = mx.zeros((1, 4096, 256))[:, -1:]  # 4 MB, of which 1 KB is the state
        mx.eval(cache.gather())
    assert mx.get_active_memory() - before < 1 << 20


@pytest.mark.parametrize("kind", RECURRENT)
def test_turns_go_on_from_the_store_as_in_memory(kind: str, folder: Folder, place: Place) -> None:
    first = place.engine(folder(kind))
    first.prefill("a", [Text(SENTENCE * 9)])
    lifecycle.fork(place.store, Ref("a"), "b")
    one = first.chat(Ref("a"), [Text("And then?")], SHORT)
    two = first.chat(Ref("a"), [Text("Why?")], SHORT)
    other = place.engine(folder(kind)).chat(Ref("b"), [Text("And then?")], SHORT)
    again = place.engine(folder(kind)).chat(Ref("b"), [Text("Why?")], SHORT)
    assert (one.text, two.text) == (other.text, again.text)
    assert again.reused == place.state("b~1").manifest.cached
    assert again.prefilled == again.tokens - again.generated - again.reused


@pytest.mark.parametrize("kind", RECURRENT)
def test_going_back_stops_at_a_state_of_its_own(kind: str, folder: Folder, place: Place) -> None:
    """A state cannot be cut: the nearest one that was committed is taken up, and `reused` says where that is."""
    engine = place.engine(folder(kind))
    engine.prefill("a", [Text(SENTENCE * 5)])
    engine.extend("a", [Text("A thought.")])
    engine.extend("a", [Text(SENTENCE)])
    middle = place.state("a~1").manifest
    texts = [Text(SENTENCE * 5), Text("A thought."), Text("Another end.")]
    back = engine.prefill("a", texts, PrefillOptions(replace=True))
    assert back.reused == middle.cached and back.parted_at is not None and back.parted_at >= back.reused
    early = engine.prefill("a", [Text(SENTENCE + "It parts before any state.")], PrefillOptions(replace=True))
    assert early.reused == 0 and early.prefilled == early.tokens - 1


@pytest.mark.parametrize("kind", ["mamba2", "qwen3_next"])
def test_no_prefix_is_taken_without_its_state(kind: str, folder: Folder, place: Place) -> None:
    """Blocks of another agent in the domain fit, but no state does."""
    engine = place.engine(folder(kind))
    assert engine.prefill("a", [Text(SENTENCE * 60)], PrefillOptions(domain="team")).tokens > 512
    assert engine.prefill("b", [Text(SENTENCE * 60 + "More.")], PrefillOptions(domain="team")).reused == 0


def test_a_prefill_that_was_cut_short_goes_on(folder: Folder, place: Place) -> None:
    left = [2]

    def should_stop() -> bool:
        left[0] -= 1
        return left[0] < 0

    engine = place.engine(folder("qwen3_next"))
    assert not engine.prefill("a", [Text(SENTENCE * 60)], watcher=Watcher(should_stop=should_stop)).complete
    rest = place.engine(folder("qwen3_next")).prefill("a", [Text(SENTENCE * 60)])
    assert rest.reused == 512 and rest.complete
    engine.prefill("b", [Text(SENTENCE * 60)])
    answers = [place.engine(folder("qwen3_next")).chat(Ref(name), [Text("So?")], SHORT).text for name in "ab"]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("kind", RECURRENT)
def test_repair_computes_states_again(kind: str, folder: Folder, place: Place) -> None:
    engine = place.engine(folder(kind))
    engine.prefill("a", [Text(SENTENCE * 9)])
    engine.chat(Ref("a"), [Text("And then?")], SHORT)
    head = place.state("a")
    assert head.manifest.tail is not None
    expected = engine.chat(Ref("a"), [Text("Well?")], SHORT, ChatOptions(save=False)).text
    tail = place.store.layout.object(head.agent.domain, TAIL, head.manifest.tail.sha256)
    before = tail.read_bytes()
    tail.unlink()
    with pytest.raises(DamageError):
        place.engine(folder(kind)).chat(Ref("a"), [Text("Well?")], SHORT, ChatOptions(save=False))
    done = repair(place.store, place.engine(folder(kind)).agents, Ref("a"), 0, NOBODY)
    assert not done.recomputed and done.manifest == head.digest and tail.read_bytes() == before
    assert place.engine(folder(kind)).chat(Ref("a"), [Text("Well?")], SHORT, ChatOptions(save=False)).text == expected


@pytest.mark.parametrize("kind", ["mamba2", "falcon_h1"])
def test_an_evicted_agent_computes_its_states_again(kind: str, folder: Folder, place: Place) -> None:
    engine = place.engine(folder(kind))
    for name in "ab":
        engine.prefill(name, [Text(SENTENCE * 9)])
        engine.chat(Ref(name), [Text("Well?")], SHORT)
    root = read_root(place.store.layout, place.store.layout.agent_ref("a"))
    assert root is not None and evict(place.store, root) and place.state("a").manifest.tail is None
    back = place.engine(folder(kind)).chat(Ref("a"), [Text("And?")], SHORT)
    other = engine.chat(Ref("b"), [Text("And?")], SHORT)
    assert back.text == other.text and back.recomputed and back.prefilled == other.reused + other.prefilled


def test_states_are_as_large_as_planned_and_do_not_grow(folder: Folder, place: Place) -> None:
    engine = place.engine(folder("mamba2"))
    for name, times in (("short", 1), ("long", 30)):
        engine.prefill(name, [Text(SENTENCE * times)])
    tails = [place.state(name).manifest.tail for name in ("short", "long")]
    assert tails[0] and tails[1] and abs(tails[0].bytes - tails[1].bytes) < 64
    state = sum(part.nbytes for part in place.state("long").manifest.groups[0].states)
    assert 4 * state <= tails[1].bytes < 4 * state + 8192


class Growing(Module):
    """Its state is the whole text."""

    layers = (0,)

    def make_cache(self) -> list[ArraysCache]:
        return [ArraysCache(1)]

    def __call__(self, ids: mx.array, cache: list[Any]) -> mx.array:
        past = cache[0][0]
        new = ids.astype(mx.float32)
        cache[0][0] = new if past is None else mx.concatenate([past, new], axis=1)
        return mx.zeros((*ids.shape, 8))


def test_a_state_that_grows_is_refused() -> None:
    growing: Any = Growing
    with pytest.raises(ModelMismatchError, match="grows with the text"):
        describe(growing())


def test_states_come_in_the_order_of_the_model() -> None:
    spec = describe(kinds.build("falcon_h1"))
    recurrent, full = spec.groups
    assert set(recurrent.layers) | set(full.layers) == set(range(8))
    assert np.all(np.array(spec.lists) == 2)
