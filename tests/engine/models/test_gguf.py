import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model
from safetensors import safe_open
from tokenizers import Tokenizer

from amem_cli.engine.models.gguf import _bfloat16, convert, convert_chunks
from kvstore.disk import files
from kvstore.errors import AmemError, ModelMismatchError
from tests.support.models.chat import tiny_model
from tests.support.running import children

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def llama_cpp_order(weight: Any, heads: int) -> Any:
    """What llama.cpp's converter does to rotated projections."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(folder: Path, path: Path, architecture: str = "llama", told: bool = True) -> Path:
    """The llama model in `folder` as llama.cpp writes it, in float32; `told` False leaves the context length out."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, architecture)
    if told:
        writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    add_tokenizer(writer, folder)
    with safe_open(folder / "model.safetensors", framework="numpy") as weights:
        for name in weights.keys():  # noqa: SIM118  not a dict
            array = weights.get_tensor(name)
            if "q_proj" in name or "k_proj" in name:
                heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
                array = llama_cpp_order(array, heads)
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(array))
    if "rope_scaling" in config:
        writer.add_tensor("rope_freqs.weight", rope_factors(config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    part, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def rope_factors(config: dict[str, Any]) -> Any:
    """As llama.cpp's converter computes them."""
    scaling, factors = config["rope_scaling"], []
    for i in range(0, config["head_dim"], 2):
        wavelength = 2 * np.pi * config["rope_theta"] ** (i / config["head_dim"])
        if wavelength < 8192 / scaling["high_freq_factor"]:
            factors.append(1.0)
        elif wavelength > 8192 / scaling["low_freq_factor"]:
            factors.append(scaling["factor"])
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(factors, np.float32)


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = [tokenizer.id_to_token(id_) for id_ in range(tokenizer.get_vocab_size())]
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(tokens.index("<|bos|>"))
    writer.add_eos_token_id(tokens.index("<|endoftext|>"))
    writer.add_chat_template(json.loads((folder / "tokenizer_config.json").read_text())["chat_template"])


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return tiny_model("llama", tmp_path / "model", seed=3)


def logits(folder: Path) -> mx.array:
    """[40, vocab] float32, of weights that are rounded to bfloat16 first, as a converted file's are."""
    model, _ = load_model(folder)
    model.set_dtype(mx.bfloat16)
    model.set_dtype(mx.float32)
    tokens = mx.array([[(7 * i) % 300 for i in range(40)]])
    result: mx.array = model(tokens)[0]
    return result


@pytest.mark.parametrize("scaling", [None, LLAMA3])
def test_a_llama_computes_what_it_computed_before(llama: Path, tmp_path: Path, scaling: dict[str, Any] | None) -> None:
    config = json.loads((llama / "config.json").read_text())
    if scaling:
        (llama / "config.json").write_text(json.dumps(config | {"rope_scaling": scaling, "rope_theta": 500000.0}))
    folder = convert(write_gguf(llama, tmp_path / "m.gguf"), "d", tmp_path / "cache")
    assert mx.allclose(logits(folder), logits(llama), atol=1e-4).item()
    assert json.loads((folder / "config.json").read_text()).get("rope_scaling") == scaling
    old, new = (json.loads((at / "tokenizer_config.json").read_text()) for at in (llama, folder))
    assert new["chat_template"] == old["chat_template"]
    assert (new["bos_token"], new["eos_token"]) == ("<|bos|>", "<|endoftext|>")


def test_its_tokenizer_gives_the_same_ids(llama: Path, tmp_path: Path) -> None:
    folder = convert(write_gguf(llama, tmp_path / "m.gguf"), "d", tmp_path / "cache")
    old, new = (Tokenizer.from_file(str(at / "tokenizer.json")) for at in (llama, folder))
    for text in ("The cat", "sat on the river", "é🙂", "<|im_start|>user"):
        assert new.encode(text).ids == old.encode(text).ids
        assert new.decode(new.encode(text).ids) == old.decode(old.encode(text).ids)


def test_what_is_not_known_is_refused_by_its_name(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelMismatchError, match="mamba"):
        convert(write_gguf(llama, tmp_path / "a.gguf", "mamba"), "a", tmp_path / "cache")
    with pytest.raises(ModelMismatchError, match="context_length"):
        convert(write_gguf(llama, tmp_path / "b.gguf", told=False), "b", tmp_path / "cache")
    whole = write_gguf(llama, tmp_path / "c.gguf")
    for size in (0, 3, 100, whole.stat().st_size // 2):
        cut = tmp_path / f"{size}.gguf"
        cut.write_bytes(whole.read_bytes()[:size])
        with pytest.raises(ModelMismatchError, match=rf"{size}\.gguf"):
            convert(cut, f"cut{size}", tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_a_conversion_that_died_half_way_starts_again(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, cache = write_gguf(llama, tmp_path / "m.gguf"), tmp_path / "cache"
    good = convert(source, "d", tmp_path / "good")
    steps: list[str] = []
    monkeypatch.setattr(files, "fault", lambda step, path: steps.append(f"{step} {path.name}"))
    convert(source, "d", tmp_path / "count")

    def fail_at(number: int) -> None:
        left = iter(range(number))

        def fault(_step: str, _path: Path) -> None:
            if next(left, None) is None:
                raise OSError(5, "Input/output error")

        monkeypatch.setattr(files, "fault", fault)

    for number in range(0, len(steps), 7):
        fail_at(number)
        with pytest.raises(AmemError):
            convert(source, "d", cache)
        assert not (cache / "d").exists() or number > steps.index("replace d")
    monkeypatch.setattr(files, "fault", None)
    folder = convert(source, "d", cache)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        path.name: path.read_bytes() for path in good.iterdir()
    }


def test_two_processes_convert_one_file(llama: Path, tmp_path: Path) -> None:
    source = write_gguf(llama, tmp_path / "m.gguf")
    code = (
        f"from pathlib import Path; from amem_cli.engine.models.gguf import convert as c; p = Path({str(tmp_path)!r})\n"
    )
    code += "print(c(p / 'm.gguf', 'd', p / 'cache'))"
    running = [children.start(sys.executable, "-c", code, stdout=subprocess.PIPE) for _ in range(3)]
    said = {process.communicate(timeout=children.LIMIT)[0].decode().strip() for process in running}
    assert said == {str(tmp_path / "cache" / "d")}
    assert all(process.returncode == 0 for process in running)
    assert source.exists()
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["d", "d.lock"]


def test_pieces_that_are_another_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "part").write_bytes(b"GGUF")
    with pytest.raises(ModelMismatchError, match="damaged"):
        convert_chunks([tmp_path / "part"], "0" * 64, tmp_path / "cache")


def test_bfloat16_is_rounded_as_mlx_rounds() -> None:
    values = np.random.default_rng(0).normal(size=10_000).astype(np.float32)
    values = np.concatenate([values, np.array([0.0, -0.0, 1.00390625, 1.01171875, 3e38], np.float32)])
    expected = np.array(mx.array(values).astype(mx.bfloat16).view(mx.uint16))
    assert np.array_equal(_bfloat16(values), expected)


def test_gemma_is_whole(gemma: Path) -> None:
    config = json.loads((gemma / "config.json").read_text())
    assert (config["model_type"], config["sliding_window"], config["head_dim"]) == ("gemma3_text", 512, 256)
    weights = mx.load(str(gemma / "model.safetensors"))
    assert isinstance(weights, dict)
    assert weights["model.embed_tokens.weight"].shape == (262144, 640)
    assert {weight.dtype for weight in weights.values()} == {mx.bfloat16}
