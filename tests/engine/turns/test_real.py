"""The main job on real models: what was read once is not read again, and the answers are those of full precision."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from amem_cli.demo.handbook import handbook
from amem_cli.engine.models.load import LoadedModel, load
from amem_cli.engine.models.registry import find
from amem_cli.engine.prompt.transcript import Text
from amem_cli.engine.turns.requests import ChatOptions, Generation, PrefillOptions
from benchmarks.fidelity import compare
from kvstore import lifecycle
from kvstore.format.codecs import DEFAULT_CODEC
from kvstore.format.layers import bytes_per_token
from kvstore.format.layout import StoreLayout
from kvstore.naming import Ref
from tests.support.engine.caches import fill, layer_group
from tests.support.engine.places import Place
from tests.support.running import children
from tests.support.running.amem import COMMAND

pytestmark = pytest.mark.long

Fed = list[list[int]]


@pytest.fixture(scope="module")
def read(gemma: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A store whose agent `a` has 4,096 tokens in its cache, and whose agent `w` 599."""
    place = Place(tmp_path_factory.mktemp("real"))
    engine = place.engine(gemma)
    prompt = engine.model.prompt
    ids = prompt.encode(handbook(4300))
    for name, tokens in (("a", 4097), ("w", 600)):
        result = engine.prefill(name, [Text(prompt.decode(ids[: tokens - 1]))])
        assert result.tokens == tokens
    return place


def amem(place: Place, *arguments: str) -> dict[str, Any]:
    """Run `amem --json` in a process of its own; its result."""
    env = {**os.environ, "NO_COLOR": "1", "AMEM_STORE": str(place.root / "store")}
    done = children.run(*COMMAND, "--json", *arguments, check=True, env=env)
    result: dict[str, Any] = json.loads(done.stdout.rstrip().rsplit("\n", 1)[-1])
    return result


def spy(monkeypatch: pytest.MonkeyPatch, model: LoadedModel) -> Fed:
    """Every pass through the model, as the tokens that it was given."""
    kind, fed = type(model.model), []
    forward = kind.__call__

    def listen(self: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        fed.append(inputs[0].tolist())
        return forward(self, inputs, *args, **kwargs)

    monkeypatch.setattr(kind, "__call__", listen)
    return fed


def test_a_new_process_answers_without_reading_again(read: Place) -> None:
    result = amem(read, "chat", "a", " The", "--max-tokens", "3", "--no-save")
    assert result["reused"] == 4096 and result["prefilled"] == 2 and result["generated"] == 3
    assert result["text"]


def test_one_pass_stands_before_the_first_token(read: Place, gemma: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = read.engine(gemma)
    fed = spy(monkeypatch, engine.model)
    result = engine.chat(Ref("a"), [Text(" The")], Generation(max_tokens=2), ChatOptions(save=False))
    assert result.generated == 2
    assert [len(tokens) for tokens in fed] == [2, 1]  # the second pass is for the second token


def test_after_a_restore_only_new_tokens_are_fed_on_window_layers_too(read: Place, gemma: Path) -> None:
    engine = read.engine(gemma)
    lifecycle.snapshot(read.store, Ref("w"), "at-600")
    extended = engine.extend("w", [Text(handbook(1400))])
    assert extended.tokens > 1900 and extended.prefilled == extended.tokens - 600
    lifecycle.restore(read.store, Ref("w", snapshot="at-600"), wait=0)
    result = amem(read, "chat", "w", " The", "--max-tokens", "2")
    assert result["reused"] == 599 and result["prefilled"] == 2


def test_window_layers_hold_at_most_four_blocks() -> None:
    group = fill(layer_group(1, 256, 256, window=512, layers=1), 8192).group
    assert group.held_blocks <= 4 and sum(slab.blocks for slab in group.slabs) <= 4


def test_a_turn_writes_its_own_tokens_and_the_tail(read: Place, gemma: Path) -> None:
    lifecycle.fork(read.store, Ref("a"), "turn")
    result = read.engine(gemma).chat(Ref("turn"), [Text(" The")], Generation(max_tokens=63))
    manifest = read.state("turn").manifest
    assert manifest.cached == 4096 + 64 and manifest.tail is not None
    q4 = 64 * sum(bytes_per_token(group, manifest.codec) for group in manifest.groups)
    assert result.new_blocks == 0
    assert manifest.tail.bytes <= 1.05 * q4
    assert result.bytes_written <= 1.2 * q4
    shown = amem(read, "inspect", "turn")
    assert shown["cached"] == manifest.cached


def blocks_of(place: Place, ref: str) -> set[str]:
    return {row.sha256 for row in place.store.blocks(place.state(ref).manifest)}


def test_fork_and_snapshot_write_no_block(read: Place) -> None:
    folder = read.root / "store" / "domains"
    before = set(folder.rglob("*.safetensors"))
    lifecycle.fork(read.store, Ref("a"), "copy")
    lifecycle.snapshot(read.store, Ref("copy"), "s")
    assert set(folder.rglob("*.safetensors")) == before
    assert blocks_of(read, "copy") == blocks_of(read, "a")


def test_four_turns_with_a_chat_template(qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cached tokens are the concatenation of what was fed, and what the template renders for the whole talk."""
    place = Place(tmp_path)
    engine = place.engine(qwen)
    prompt = engine.model.prompt
    fed = spy(monkeypatch, engine.model)
    engine.prefill("a", [], PrefillOptions(system="You answer in one word."))
    expected = "<|im_start|>system\nYou answer in one word.<|im_end|>\n"
    for question in ("The capital of France?", "Of Italy?", "Of Spain?", "Two plus two, as a digit?"):
        result = engine.chat(Ref("a"), [Text(question)], Generation(max_tokens=8))
        ended = "<|im_end|>" if result.finish == "stop" else ""
        expected += f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{result.text}{ended}"
        expected += "" if question.startswith("Two") else "\n" if ended else "<|im_end|>\n"
        assert result.reused + result.prefilled + result.generated == result.tokens
    manifest = place.state("a").manifest
    tokens = place.store.tokens(manifest).tolist()
    assert [token for passed in fed for token in passed] == tokens[: manifest.cached]
    assert prompt.decode(tokens) == expected
    assert tokens == prompt.encode(expected, raw=True)
    assert manifest.pending == 1


@pytest.fixture(scope="module", params=["gemma", "qwen"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    folder: Path = request.getfixturevalue(request.param)
    cache = tmp_path_factory.mktemp("cache")
    yield load(find(StoreLayout(cache), str(folder)), cache)


def test_the_cache_is_faithful_where_the_paper_s_codec_is_not(model: LoadedModel) -> None:
    """KL to full precision, in nats per token; benchmarks/fidelity.py prints it for any text."""
    ids = model.prompt.opening() + model.prompt.encode(handbook(500))
    scores = compare(model, ["q4-token", DEFAULT_CODEC, "q8-channel"], ids[:321], context=0, step=64)
    kl = {codec: score.kl for codec, score in scores.items()}
    assert 0 < kl["q8-channel"] < kl[DEFAULT_CODEC] < 0.04
    assert kl["q4-token"] > 5 * kl[DEFAULT_CODEC]
