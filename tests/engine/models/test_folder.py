"""A model folder's small files: wrong types in them are errors about the model, never bugs."""

import json
from pathlib import Path

import pytest

from amem_cli.engine.models.folder import chat_template, read_config
from amem_cli.engine.models.paper import CONTEXT, published
from kvstore.errors import ModelMismatchError


@pytest.mark.parametrize(
    "wrong", [[], {"text_config": []}, {"text_config": "x"}, {"eos_token_id": "2"}, {"eos_token_id": [1, "2"]}]
)
def test_a_config_with_wrong_types_is_refused(tmp_path: Path, wrong: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps(wrong))
    with pytest.raises(ModelMismatchError, match=r"config\.json"):
        read_config(tmp_path)


@pytest.mark.parametrize("right", [{}, {"text_config": {"x": 1}, "eos_token_id": 2}, {"eos_token_id": [1, 2]}])
def test_a_config_is_read(tmp_path: Path, right: dict[str, object]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(right))
    assert read_config(tmp_path) == right
    assert published({**right, "hidden_size": [1]}, CONTEXT, 1, 1) is None


def test_templates_by_name(tmp_path: Path) -> None:
    settings = tmp_path / "tokenizer_config.json"
    named = [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]
    settings.write_text(json.dumps({"chat_template": named}))
    assert chat_template(tmp_path) == "d"
    for wrong in (["x"], [{"template": "d"}], [{"name": 1, "template": "d"}]):
        settings.write_text(json.dumps({"chat_template": wrong}))
        with pytest.raises(ModelMismatchError, match="chat_template"):
            chat_template(tmp_path)
    settings.write_text(json.dumps({"chat_template": [{"name": "default", "template": 1}]}))
    assert chat_template(tmp_path) is None
