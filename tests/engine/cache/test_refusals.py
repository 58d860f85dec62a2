"""What a turn refuses, each before it changes anything."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from amem_cli.engine.models.load import load
from amem_cli.engine.models.registry import find
from amem_cli.engine.prompt.transcript import Text
from amem_cli.engine.turns.requests import ChatOptions, Generation, PrefillOptions
from kvstore.errors import DamageError, ModelMismatchError, UsageError
from kvstore.format.kinds import BLOCK
from kvstore.format.layout import StoreLayout
from kvstore.naming import Ref
from tests.support.engine.places import SENTENCE, SHORT, Place
from tests.support.models.chat import Kind, tiny_model

Tiny = Callable[[Kind], Path]


def change_weight(folder: Path) -> None:
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)


def change_config(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(path.read_text().replace("10000.0", "10001.0"))


def change_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace('"add_prefix_space":false', '"add_prefix_space":true', 1))
    path.write_text(path.read_text().replace('"add_prefix_space": false', '"add_prefix_space": true', 1))


def change_template(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(path.read_text().replace("You help.", "You hinder."))


@pytest.mark.parametrize("part", ["weights", "config", "tokenizer", "template"])
def test_another_model_is_refused_by_the_part_that_differs(part: str, tiny: Tiny, place: Place, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny("llama"), tmp_path / "model"))
    place.engine(folder).prefill("a", [Text(SENTENCE)])
    head = place.state("a").digest
    {"weights": change_weight, "config": change_config, "tokenizer": change_tokenizer, "template": change_template}[
        part
    ](folder)
    engine = place.engine(folder)
    turns: list[Callable[[], object]] = [
        lambda: engine.chat(Ref("a"), [Text("Well?")], SHORT),
        lambda: engine.chat(Ref("a"), [Text("Well?")], SHORT, ChatOptions(save=False)),
        lambda: engine.extend("a", [Text("Well?")]),
        lambda: engine.prefill("a", [Text(SENTENCE)]),
        lambda: engine.prefill("a", [Text("x")], PrefillOptions(replace=True)),
    ]
    for turn in turns:
        with pytest.raises(ModelMismatchError, match=f"other {part} than"):
            turn()
    assert place.state("a").digest == head


def test_a_refused_resume_leaves_later_answers_alone(tiny: Tiny, place: Place) -> None:
    engine = place.engine(tiny("llama"))
    engine.prefill("good", [Text(SENTENCE * 30)])
    engine.prefill("bad", [Text(SENTENCE * 31)])
    row = place.store.blocks(place.state("bad").manifest)[1]
    path = place.store.layout.object(place.state("bad").agent.domain, BLOCK, row.sha256)
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[-9] ^= 4
    path.write_bytes(data)
    expected = place.engine(tiny("llama")).chat(Ref("good"), [Text("Well?")], SHORT, ChatOptions(save=False)).text
    with pytest.raises(DamageError, match="altered"):
        engine.chat(Ref("bad"), [Text("Well?")], SHORT)
    assert engine.chat(Ref("good"), [Text("Well?")], SHORT).text == expected


def test_context_length_is_a_limit(tiny: Tiny, place: Place, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny("llama"), tmp_path / "model"))
    path = folder / "config.json"
    path.write_text(path.read_text().replace("32768", "40"))
    engine = place.engine(folder)
    with pytest.raises(UsageError, match="context ends at 40"):
        engine.prefill("a", [Text(SENTENCE)])
    assert not place.store.agents()
    engine.prefill("a", [Text("The cat")])
    result = engine.chat(Ref("a"), [Text("x")], Generation(max_tokens=500))
    assert result.finish == "length" and result.tokens == 40


def test_empty_prompt_and_refused_role(tiny: Tiny, place: Place, tmp_path: Path) -> None:
    bare = tiny_model("llama", tmp_path / "bare", template=None)
    engine = place.engine(tiny("llama"))
    with pytest.raises(UsageError, match="role"):
        engine.prefill("a", [Text("x", role="tool")])
    assert load(find(StoreLayout(tmp_path / "none"), str(bare)), tmp_path / "cache").prompt.has_template is False
