import json
from pathlib import Path

import pytest

from amem_cli.engine.models import registry
from kvstore.errors import AmemError, ConflictError, DamageError, NotFoundError, UsageError
from kvstore.format.layout import StoreLayout
from tests.support.models.chat import tiny_model


@pytest.fixture
def layout(tmp_path: Path) -> StoreLayout:
    return StoreLayout(tmp_path / "store")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_model("llama", tmp_path / "model")


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    return path


def test_what_was_added_is_listed_found_and_removed(layout: StoreLayout, folder: Path, gguf_file: Path) -> None:
    assert registry.entries(layout) == []
    adapter = folder.parent / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    tuned = registry.add(layout, "Tuned", str(folder), adapter)
    packed = registry.add(layout, "packed", str(gguf_file))
    assert (tuned.kind, tuned.folder, tuned.adapter) == ("folder", folder, adapter)
    assert (packed.kind, packed.folder, packed.source) == ("gguf", None, str(gguf_file))
    assert registry.entries(layout) == [packed, tuned]
    assert registry.find(layout, "tuned") == tuned
    assert registry.add(layout, "Tuned", str(folder), adapter) == tuned
    registry.remove(layout, "Tuned")
    assert registry.entries(layout) == [packed]
    with pytest.raises(NotFoundError):
        registry.remove(layout, "Tuned")


def test_a_name_stands_for_one_model(layout: StoreLayout, folder: Path, gguf_file: Path) -> None:
    registry.add(layout, "m", str(folder))
    with pytest.raises(ConflictError):
        registry.add(layout, "m", str(gguf_file))
    with pytest.raises(ConflictError):
        registry.add(layout, "M", str(folder))
    with pytest.raises(ConflictError):
        registry.add(layout, registry.DEMO, str(folder))


def test_without_a_name_it_is_the_only_one(layout: StoreLayout, folder: Path, gguf_file: Path) -> None:
    with pytest.raises(UsageError) as none:
        registry.find(layout, None)
    assert registry.DEMO in (none.value.hint or "")
    only = registry.add(layout, "one", str(folder))
    assert registry.find(layout, None) == only
    registry.add(layout, "two", str(gguf_file))
    with pytest.raises(UsageError) as several:
        registry.find(layout, None)
    assert "one, two" in (several.value.hint or "")


@pytest.mark.usefixtures("gguf_file")
def test_a_path_or_hub_id_is_a_model_and_its_name_finds_it_again(
    layout: StoreLayout, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    for text, kind in (("model", "folder"), ("m.gguf", "gguf"), ("org/name-4bit", "hub"), (registry.DEMO, "demo")):
        entry = registry.find(layout, text)
        assert entry.kind == kind
        monkeypatch.chdir("/")
        assert registry.find(layout, entry.name) == entry
        monkeypatch.chdir(folder.parent)


@pytest.mark.parametrize("text", ["nothing", "./nothing", "/nowhere/m.gguf", "a/b/c", "", "../x"])
def test_what_is_not_there_is_one_clear_line(layout: StoreLayout, text: str) -> None:
    with pytest.raises(NotFoundError) as caught:
        registry.find(layout, text)
    assert caught.value.hint
    assert "\n" not in caught.value.message


def test_a_misspelt_name_is_recognized(layout: StoreLayout, folder: Path) -> None:
    registry.add(layout, "llama-small", str(folder))
    with pytest.raises(NotFoundError) as caught:
        registry.find(layout, "lama-small")
    assert "llama-small" in (caught.value.hint or "")


def test_a_folder_without_a_model_and_other_files_are_refused(layout: StoreLayout, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    for source in ("notes.txt", "empty"):
        with pytest.raises(NotFoundError):
            registry.add(layout, "m", str(tmp_path / source))
    with pytest.raises(AmemError):
        registry.add(layout, "m/../../x", str(tmp_path / "empty"))
    assert not layout.root.exists()


RECORD = {"adapter": None, "format": 1, "kind": "folder", "name": "m", "source": "/x"}
WRONG = {"kind": "z", "name": 5, "source": None, "adapter": ["a"], "format": 2, "other": 1}


@pytest.mark.parametrize(
    "content", ["", "[]", '{"name": "m"}', *(json.dumps({**RECORD, key: value}) for key, value in WRONG.items())]
)
def test_a_damaged_record_is_named(layout: StoreLayout, folder: Path, content: str) -> None:
    registry.add(layout, "m", str(folder))
    layout.model_name("m").write_text(content)
    with pytest.raises(DamageError, match=r"m\.json"):
        registry.entries(layout)
