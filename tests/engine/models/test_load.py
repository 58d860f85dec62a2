import json
import shutil
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.quantized import quantize
from mlx_lm.utils import load_model, save_model

from amem_cli.engine.models.load import LoadedModel, _weights, load, model_bytes
from amem_cli.engine.models.registry import DEMO, ModelEntry, find
from amem_cli.engine.models.sources import materialize
from kvstore.errors import ModelMismatchError, NotFoundError
from kvstore.format.layout import StoreLayout
from tests.support.models.chat import KINDS, tiny_model
from tests.support.running import children


def entry(folder: Path, adapter: Path | None = None) -> ModelEntry:
    return ModelEntry(str(folder), str(folder), "folder", folder, adapter)


def logits(loaded: LoadedModel, text: str = "The cat sat on the") -> mx.array:
    result: mx.array = loaded.model(mx.array([loaded.prompt.opening() + loaded.prompt.encode(text)]))[0, -1]
    return result


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_model("llama", tmp_path / "model")


@pytest.mark.parametrize("kind", KINDS)
def test_tiny_models_load_and_their_logits_vary(kind: str, tmp_path: Path) -> None:
    first = load(entry(tiny_model(kind, tmp_path / "a", seed=1)), tmp_path / "cache")
    again = load(entry(tiny_model(kind, tmp_path / "b", seed=1)), tmp_path / "cache")
    other = load(entry(tiny_model(kind, tmp_path / "c", seed=2)), tmp_path / "cache")
    assert mx.array_equal(logits(first), logits(again)).item()
    assert first.identity.fingerprint == again.identity.fingerprint != other.identity.fingerprint
    assert (mx.std(logits(first)) > 0.3).item()
    assert not mx.allclose(logits(first), logits(first, "What is the name")).item()
    assert first.context_length == 32768
    assert first.prompt.has_template


def test_on_the_cpu_weights_are_float32_and_nothing_is_lost(folder: Path, tmp_path: Path) -> None:
    if mx.default_device().type != mx.DeviceType.cpu:
        pytest.skip("other devices keep the weights' own type")
    model, config = load_model(folder)
    for bits in (None, 4):
        model.set_dtype(mx.bfloat16)
        if bits:
            quantize(model, group_size=64, bits=bits)
            config["quantization"] = {"group_size": 64, "bits": bits}
        saved = tmp_path / f"saved{bits}"
        shutil.copytree(folder, saved, ignore=shutil.ignore_patterns("*.safetensors"))
        save_model(saved, model)
        (saved / "config.json").write_text(json.dumps(config))
        loaded = load(entry(saved), tmp_path / "cache")
        assert {weight.dtype for weight in _weights(loaded.model)} == {mx.float32}
        assert model_bytes(loaded.model) == model_bytes(load_model(folder)[0])
        model.set_dtype(mx.float32)
        tokens = mx.array([loaded.prompt.encode("The cat sat")])
        assert mx.allclose(loaded.model(tokens), model(tokens), atol=1e-3).item()


def test_an_adapter_changes_the_model_and_its_identity(folder: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    lora = {"rank": 4, "scale": 10.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps({"num_layers": 1, "lora_parameters": lora}))
    random = np.random.default_rng(0)
    prefix = "model.layers.3.self_attn.q_proj"
    weights = {
        f"{prefix}.lora_a": mx.array(random.normal(size=(64, 4)), mx.bfloat16),
        f"{prefix}.lora_b": mx.array(random.normal(size=(4, 256)), mx.bfloat16),
    }
    mx.save_safetensors(str(adapter / "adapters.safetensors"), weights)
    plain, tuned = load(entry(folder), tmp_path / "cache"), load(entry(folder, adapter), tmp_path / "cache")
    assert not mx.allclose(logits(plain), logits(tuned), atol=1e-3).item()
    assert plain.identity.fingerprint != tuned.identity.fingerprint
    (adapter / "adapters.safetensors").unlink()
    with pytest.raises(NotFoundError, match="adapters"):
        load(entry(folder, adapter), tmp_path / "cache")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b"{}"),
        ("config.json", b'{"model_type": "telepathy"}'),
        ("config.json", b'{"model_type": "llama"}'),
        ("config.json", b"["),
        ("model.safetensors", b"short"),
        ("model.safetensors", b"\xff" * 100),
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b"\xff"),
        ("tokenizer_config.json", b"nothing"),
    ],
)
def test_a_broken_folder_is_one_line(folder: Path, tmp_path: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(ModelMismatchError) as caught:
        load(entry(folder), tmp_path / "cache")
    assert "\n" not in caught.value.message
    assert str(folder) in caught.value.message


def test_truncated_weights_are_not_loaded(folder: Path, tmp_path: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ModelMismatchError):
        load(entry(folder), tmp_path / "cache")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_missing_files_are_not_found(folder: Path, tmp_path: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(NotFoundError, match=r"config\.json|weights"):
        load(entry(folder), tmp_path / "cache")


def test_code_that_a_model_brings_is_never_run(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_file": "own.py"}))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ModelMismatchError):
        load(entry(folder), tmp_path / "cache")
    assert not (tmp_path / "ran").exists()


def test_loading_prints_nothing(folder: Path, tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from amem_cli.engine.models.load import load\n"
        "from amem_cli.engine.models.registry import ModelEntry as E\n"
        f"f = Path({str(folder)!r}); load(E('m', str(f), 'folder', f), Path({str(tmp_path / 'cache')!r}))"
    )
    done = children.run(sys.executable, "-c", code, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_a_hub_model_without_a_network_is_one_line(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from amem_cli.engine.models.sources import materialize\n"
        "from amem_cli.engine.models.registry import ModelEntry as E\n"
        "from kvstore.errors import NotFoundError\n"
        "try: materialize(E('org/none', 'org/none', 'hub'), Path('.'))\n"
        "except NotFoundError as error: print(error.message)"
    )
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = children.run(sys.executable, "-c", code, check=True, env=environment)
    assert done.stdout.startswith("cannot fetch org/none")
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


def test_gemma_knows_what_it_learnt(gemma: Path, tmp_path: Path) -> None:
    loaded = load(entry(gemma), tmp_path / "cache")
    assert not loaded.prompt.has_template
    for text, next_word in (("To be, or not to be, that is the", " question"), ("one, two, three, four,", " five")):
        assert loaded.prompt.decode(np.array(mx.argmax(logits(loaded, text), keepdims=True)).tolist()) == next_word


def test_the_demo_model_is_converted_once(gemma: Path) -> None:
    demo = find(StoreLayout(gemma / "no-store"), DEMO)
    assert materialize(demo, gemma.parent.parent) == gemma
