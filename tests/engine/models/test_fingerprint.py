import json
import os
import shutil
import sys
import time
from pathlib import Path

import pytest

from amem_cli.engine.models import fingerprint
from amem_cli.engine.models.fingerprint import PARTS, compare, identify
from amem_cli.engine.models.folder import chat_template
from kvstore.errors import ModelMismatchError, NotFoundError
from tests.support.models.chat import tiny_model
from tests.support.running import children


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_model("llama", tmp_path / "model")


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def edit(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_copy_elsewhere_is_the_same_model(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    first, second = identify(folder, None, "a", None), identify(copy, None, "b", None)
    assert (first.fingerprint, first.parts) == (second.fingerprint, second.parts)
    assert compare(first, second) == []
    assert tuple(first.parts) == PARTS
    assert first.parts["adapter"] == "none"


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("weights", lambda folder: flip(folder / "model.safetensors", 200_000)),
        ("weights", lambda folder: (folder / "model.safetensors").rename(folder / "model-1.safetensors")),
        ("config", lambda folder: edit(folder / "config.json", rope_theta=20000.0)),
        ("tokenizer", lambda folder: flip(folder / "tokenizer.json", 300)),
        ("tokenizer", lambda folder: edit(folder / "tokenizer_config.json", add_bos_token=False)),
        ("template", lambda folder: edit(folder / "tokenizer_config.json", chat_template="other")),
        ("template", lambda folder: (folder / "chat_template.jinja").write_text("other")),
    ],
)
def test_each_change_names_its_part(folder: Path, part: str, change: object) -> None:
    before = identify(folder, None, "m", None)
    assert callable(change)
    change(folder)
    after = identify(folder, None, "m", None)
    assert compare(before, after) == [part]
    assert before.fingerprint != after.fingerprint


def test_how_a_model_was_saved_is_no_difference(folder: Path) -> None:
    before = identify(folder, None, "m", None)
    edit(folder / "config.json", transformers_version="5.0", torch_dtype="bfloat16", eos_token_id=[1, 2])
    assert identify(folder, None, "m", None).fingerprint == before.fingerprint


def test_the_adapter_is_part_of_the_model(folder: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "adapters.safetensors").write_bytes(b"weights")
    without, with_it = identify(folder, None, "m", None), identify(folder, adapter, "m", None)
    assert compare(without, with_it) == ["adapter"]
    flip(adapter / "adapters.safetensors", 3)
    assert compare(with_it, identify(folder, adapter, "m", None)) == ["adapter"]


def settle(memory: Path, folder: Path) -> None:
    """Let the files grow old enough for their digests to be remembered."""
    time.sleep(fingerprint._SETTLED_SECONDS + 0.1)
    identify(folder, None, "m", memory)
    assert str(folder / "model.safetensors") in json.loads(memory.read_text())


def test_a_change_in_place_is_noticed_though_size_and_mtime_are_kept(folder: Path, tmp_path: Path) -> None:
    memory, weights = tmp_path / "digests.json", folder / "model.safetensors"
    settle(memory, folder)
    before, stat = identify(folder, None, "m", memory), weights.stat()
    flip(weights, 200_000)
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (weights.stat().st_size, weights.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    assert compare(before, identify(folder, None, "m", memory)) == ["weights"]


def test_weights_are_read_once(folder: Path, tmp_path: Path) -> None:
    memory, weights = tmp_path / "digests.json", folder / "model.safetensors"
    settle(memory, folder)
    known = json.loads(memory.read_text())
    stat, digest = known[str(weights)]
    known[str(weights)] = [stat, "0" * len(digest)]  # shows up in the fingerprint only if the file is not read again
    remembered = identify(folder, None, "m", None)
    memory.write_text(json.dumps(known))
    assert compare(remembered, identify(folder, None, "m", memory)) == ["weights"]


@pytest.mark.parametrize("wrong", [["0" * 32], [1, "0" * 32], [[1, 2, 3, 4, 5], "zz"], [[1, 2, 3, 4, "5"], "0" * 32]])
def test_a_damaged_memory_is_not_used(folder: Path, tmp_path: Path, wrong: list[object]) -> None:
    memory, weights = tmp_path / "digests.json", folder / "model.safetensors"
    memory.write_text(json.dumps({str(weights): wrong}))
    assert identify(folder, None, "m", memory) == identify(folder, None, "m", None)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"a": 1}', b"\xff", None])
def test_a_memory_that_cannot_be_used_is_only_slow(folder: Path, tmp_path: Path, content: bytes | None) -> None:
    memory = tmp_path / "digests.json"
    if content is None:
        memory.mkdir()
    else:
        memory.write_bytes(content)
    assert identify(folder, None, "m", memory) == identify(folder, None, "m", None)


def test_missing_and_broken_files_are_named(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelMismatchError, match=r"config\.json"):
        identify(folder, None, "m", None)
    (folder / "config.json").unlink()
    with pytest.raises(NotFoundError, match=r"config\.json"):
        identify(folder, None, "m", None)
    (folder / "model.safetensors").unlink()
    with pytest.raises(NotFoundError, match="weights"):
        identify(folder, None, "m", None)


def test_the_template_is_found_wherever_it_stands(folder: Path) -> None:
    edit(
        folder / "tokenizer_config.json",
        chat_template=[{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}],
    )
    assert chat_template(folder) == "d"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "j"}))
    assert chat_template(folder) == "j"
    (folder / "chat_template.jinja").write_text("own")
    assert chat_template(folder) == "own"


def test_no_mlx_is_needed() -> None:
    code = "import sys, amem_cli.engine.models.fingerprint, amem_cli.engine.models.registry\n"
    code += "print([name for name in ('mlx.core', 'mlx_lm', 'transformers', 'numpy', 'gguf') if name in sys.modules])"
    done = children.run(sys.executable, "-c", code, check=True)
    assert done.stdout.strip() == "[]"
