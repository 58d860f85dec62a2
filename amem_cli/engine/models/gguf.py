"""GGUF files as MLX model folders: converted once, kept under the digest of the file's content.

Weights are dequantized to bfloat16 a few rows at a time, so that a conversion needs little memory whatever the
model's size, and written in the layout that mlx-lm loads. Supported are architectures with the plain transformer
block: gemma3, llama (Mistral included) and qwen2. Others are refused by name.
"""

import hashlib
import json
import mmap
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor, dequantize
from numpy.typing import NDArray

from amem_cli.engine.models.gguf_tokenizer import tokenizer_of
from kvstore.disk import files
from kvstore.disk.locks import Lock
from kvstore.errors import AmemError, ModelMismatchError

ARCHITECTURES = ("gemma3", "llama", "qwen2")
_ROWS_BYTES = 1 << 26  # float32 bytes that are dequantized at once
_WAIT_SECONDS = 3600.0  # another process may be converting the same file

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
_GEMMA_BLOCK = _BLOCK | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_ROPE_FACTORS = "rope_freqs.weight"

# What every Llama 3.x was trained with; GGUF keeps only the resulting factors.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

Fields = dict[str, Any]


@dataclass(frozen=True)
class _Tensor:
    """A tensor of the file under its MLX name, read lazily."""

    name: str
    source: ReaderTensor
    heads: int | None = None  # of rotated projections of a llama, whose rows llama.cpp interleaves
    minus_one: bool = False  # Gemma's norms are stored plus one

    @property
    def shape(self) -> list[int]:
        return [int(size) for size in reversed(self.source.shape)]

    def rows(self) -> Iterator[bytes]:
        """The bfloat16 bytes of the tensor, a few rows at a time."""
        data = self.source.data if self.source.data.ndim > 1 else self.source.data[None]
        if self.heads is not None:
            data = data[_halves_order(len(data), self.heads)]
        step = max(1, _ROWS_BYTES // (4 * self.shape[-1]))
        for start in range(0, len(data), step):
            values = dequantize(data[start : start + step], self.source.tensor_type).astype(np.float32, copy=False)
            yield _bfloat16(values - 1 if self.minus_one else values).tobytes()


def convert(source: Path, digest: str, cache: Path) -> Path:
    """The MLX folder of the GGUF file `source`, made in the folder `cache` unless it is there already.

    `digest`: of the file's content. Raises ModelMismatchError for a file that is no GGUF or holds an unknown model.
    """
    return _once(digest, cache, lambda part: _write_folder(_open(source), part))


def convert_chunks(chunks: Sequence[Path], sha256: str, cache: Path) -> Path:
    """`convert` of a GGUF file in pieces. Raises ModelMismatchError if the joined file has another digest."""

    def make(part: Path) -> None:
        joined = part / "joined.gguf"
        with ExitStack() as stack:
            opened = [stack.enter_context(chunk.open("rb")) for chunk in chunks]
            mapped = [stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) for file in opened]
            _join(mapped, sha256, joined)
        _write_folder(_open(joined), part)
        files.unlink(joined)

    return _once(sha256, cache, make)


def _join(chunks: Sequence[mmap.mmap], sha256: str, target: Path) -> None:
    whole = hashlib.sha256()
    for chunk in chunks:
        whole.update(chunk)
    if whole.hexdigest() != sha256:
        raise ModelMismatchError("the installed model files are damaged", "install their packages again")
    files.write_new(target, [])
    for chunk in chunks:
        files.append(target, chunk[:], flush=False)


def _once(digest: str, cache: Path, make: Callable[[Path], None]) -> Path:
    """The folder `digest` in `cache`, filled by `make` unless it is there.

    The rename is atomic: a second process waits for the first, and removes what a killed one left behind.
    """
    folder, part = cache / digest, cache / f"{digest}.part"
    if folder.is_dir():
        return folder
    files.make_dirs(cache)
    with Lock(cache / f"{digest}.lock", "a model's conversion", "convert").acquire(False, _WAIT_SECONDS):
        if not folder.is_dir():
            if part.is_dir():
                files.remove_folder(part)
            files.make_dir(part)
            try:
                make(part)
            except BaseException:
                with suppress(AmemError):  # free the disk; the first error is the one to report
                    files.remove_folder(part)
                raise
            files.sync_dir(part)
            files.replace(part, folder)
            files.sync_dir(cache)
    return folder


def _open(source: Path) -> GGUFReader:
    try:
        return GGUFReader(source)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise ModelMismatchError(f"{source} is not a whole GGUF file", "fetch it again") from error


def _write_folder(reader: GGUFReader, folder: Path) -> None:
    fields = {name: field.contents() for name, field in reader.fields.items()}
    architecture = fields.get("general.architecture")
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelMismatchError(f"GGUF files of {architecture!r} models cannot be read", f"those of {known} can")
    if fields.get("split.count", 1) > 1:
        raise ModelMismatchError("a GGUF model in several files cannot be read", "join them: llama-gguf-split --merge")
    tensors = [_place(tensor, architecture, fields) for tensor in reader.tensors if tensor.name != _ROPE_FACTORS]
    factors = next((tensor.data for tensor in reader.tensors if tensor.name == _ROPE_FACTORS), None)
    tokenizer, settings = tokenizer_of(fields)
    config = _config(architecture, fields, tensors, factors)
    files.write_new(folder / "config.json", [json.dumps(config).encode()])
    files.write_new(folder / "tokenizer.json", [tokenizer.to_str().encode()])
    files.write_new(folder / "tokenizer_config.json", [json.dumps(settings).encode()])
    _write_weights(folder / "model.safetensors", tensors)


def _write_weights(path: Path, tensors: list[_Tensor]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + 2 * int(np.prod(tensor.shape))
        header[tensor.name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    files.write_new(path, [len(text).to_bytes(8, "little"), text])
    for tensor in tensors:
        for rows in tensor.rows():
            files.append(path, rows, flush=False)
    files.append(path, b"")


def _need(fields: Fields, key: str) -> Any:
    """A number that the file must hold. Raises ModelMismatchError, also for one that differs from layer to layer."""
    value = fields.get(key)
    if not isinstance(value, int | float):
        raise ModelMismatchError(f"the GGUF file has no single {key}", "convert the model to GGUF again")
    return value


def _place(tensor: ReaderTensor, architecture: str, fields: Fields) -> _Tensor:
    """`tensor` under its MLX name, with llama.cpp's changes to it. Raises ModelMismatchError for an unknown one."""
    gemma = architecture == "gemma3"
    if tensor.name in _TOP:
        return _Tensor(_TOP[tensor.name], tensor, minus_one=gemma and "norm" in tensor.name)
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", tensor.name)
    part = match and (_GEMMA_BLOCK if gemma else _BLOCK).get(match[2])
    if match is None or part is None:
        raise ModelMismatchError(f"a {architecture} model with a tensor {tensor.name!r} cannot be read")
    heads = None
    if architecture == "llama" and match[2] in ("attn_q", "attn_k"):
        heads = _need(fields, "llama.attention.head_count")
        heads = heads if match[2] == "attn_q" else fields.get("llama.attention.head_count_kv", heads)
    return _Tensor(f"model.layers.{match[1]}.{part}.{match[3]}", tensor, heads, gemma and "norm" in match[2])


def _config(architecture: str, fields: Fields, tensors: list[_Tensor], factors: NDArray[Any] | None) -> Fields:
    """config.json as mlx-lm reads it. Raises ModelMismatchError for rotary embeddings that it cannot express."""

    def get(key: str, default: Any = None) -> Any:
        return fields.get(f"{architecture}.{key}", default)

    def need(key: str) -> Any:
        return _need(fields, f"{architecture}.{key}")

    names = {tensor.name: tensor for tensor in tensors}
    heads = need("attention.head_count")
    head_dim = get("attention.key_length", need("embedding_length") // heads)
    if get("rope.dimension_count", head_dim) != head_dim:
        raise ModelMismatchError("a GGUF model that rotates only a part of each head cannot be read")
    stops = [fields[key] for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id") if key in fields]
    config = {
        "model_type": {"gemma3": "gemma3_text"}.get(architecture, architecture),
        "hidden_size": need("embedding_length"),
        "num_hidden_layers": need("block_count"),
        "intermediate_size": need("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": need("attention.layer_norm_rms_epsilon"),
        "rope_theta": get("rope.freq_base", 10000.0),
        "max_position_embeddings": need("context_length"),
        "vocab_size": names["model.embed_tokens.weight"].shape[0],
        "tie_word_embeddings": "lm_head.weight" not in names,
        "eos_token_id": sorted(set(stops)),
    }
    scaling = _rope_scaling(get, factors, head_dim)
    if scaling is not None:
        config["rope_scaling"] = scaling
    if architecture == "gemma3":
        config |= _gemma_config(config, need("attention.sliding_window"))
    if architecture == "llama":
        config["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in names
    return config


def _gemma_config(config: Fields, window: int) -> Fields:
    """What Gemma 3's config has besides. Only the largest model, with 62 layers, scales queries by the hidden size."""
    is_largest = config["num_hidden_layers"] == 62
    by_hidden_size = config["hidden_size"] // config["num_attention_heads"]
    return {
        "query_pre_attn_scalar": by_hidden_size if is_largest else config["head_dim"],
        "sliding_window": window,
        "sliding_window_pattern": 6,
        "rope_local_base_freq": 10000.0,
    }


def _rope_scaling(get: Any, factors: NDArray[Any] | None, head_dim: int) -> Fields | None:
    if factors is not None:
        scaling = {"rope_type": "llama3", "factor": float(factors.max()), **_LLAMA3}
        if not np.allclose(factors, _llama3_factors(scaling, get("rope.freq_base", 10000.0), head_dim), rtol=1e-3):
            raise ModelMismatchError("a GGUF model whose rotary factors are not those of Llama 3 cannot be read")
        return scaling
    kind = get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": get("rope.scaling.factor")}
    if kind == "yarn":
        original = get("rope.scaling.original_context_length")
        return {"rope_type": "yarn", "factor": get("rope.scaling.factor"), "original_max_position_embeddings": original}
    raise ModelMismatchError(f"a GGUF model with {kind!r} rotary scaling cannot be read")


def _llama3_factors(scaling: Fields, base: float, head_dim: int) -> NDArray[np.float64]:
    """By how much Llama 3 slows each of the head_dim / 2 rotary frequencies (its reference code, `apply_scaling`)."""
    wavelength = 2 * np.pi * base ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] / wavelength
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    factors: NDArray[np.float64] = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    return factors


def _halves_order(rows: int, heads: int) -> NDArray[np.int64]:
    """The place of each row of a rotated projection in llama.cpp's order: it interleaves the halves of each head."""
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)


def _bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of `values` as bfloat16, rounded to nearest even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
