"""A reader of amem's stores, written from docs/reference/format.md alone: numpy, json and hashlib, nothing of amem."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
KeysAndValues = tuple[Array, ...]  # float32 [layers, heads, tokens, dim] each
DTYPES = {"I32": "<i4", "U32": "<u4", "BF16": "<u2", "F16": "<f2", "F32": "<f4"}


class State:
    """An agent's head: its manifest, its token ids, its blocks' rows, and its keys and values."""

    def __init__(self, store: Path, agent: str) -> None:
        ref = json.loads((store / "refs" / "agents" / agent.lower()).read_bytes())
        self._folder = store / "domains" / ref["domain"]
        self.salt = json.loads((self._folder / "domain.json").read_bytes())["salt"]
        self.manifest = json.loads(self._file("manifests", ref["manifest"], "json"))
        pages = [json.loads(self._file("pages", row["sha256"], "json")) for row in self.manifest["pages"]]
        self.tokens = [token for page in pages for token in page["tokens"]]
        self.rows = [row for page in pages for row in page["blocks"]] + self.manifest["window_blocks"]

    def block(self, row: dict[str, Any]) -> tuple[dict[str, str], dict[str, Array]]:
        return _tensors(self._file("blocks", row["sha256"], "safetensors"))

    def group(self, group: dict[str, Any]) -> KeysAndValues:
        """What the blocks and the tail hold of a layer group: of all cached tokens where it is `full`."""
        rows = sorted((row for row in self.rows if row["group"] == group["id"]), key=lambda row: row["position"])
        pieces = [self._dequantized(group, self.block(row)[1], "") for row in rows]
        if self.manifest["tail"]:
            parts = _tensors(self._file("tails", self.manifest["tail"]["sha256"], "safetensors"))[1]
            lead = f"{group['id']}."
            if f"{lead}k.packed" in parts:
                pieces.append(self._dequantized(group, parts, lead))
            if f"{lead}recent.k" in parts:
                pieces.append((_float32(parts[f"{lead}recent.k"]), _float32(parts[f"{lead}recent.v"])))
        return tuple(np.concatenate(arrays, axis=2) for arrays in zip(*pieces, strict=True))

    def prefix_key(self, row: dict[str, Any], parent: str) -> str:
        manifest, at = self.manifest, row["position"]
        texts = (self.salt, manifest["model"]["fingerprint"], manifest["codec"]["name"], row["group"], parent)
        fields = [text.encode() for text in texts] + [np.array(self.tokens[at : at + 256], "<i4").tobytes()]
        return hashlib.sha256(b"".join(len(field).to_bytes(8, "little") + field for field in fields)).hexdigest()

    def _file(self, kind: str, sha256: str, suffix: str) -> bytes:
        data: bytes = (self._folder / kind / sha256[:2] / f"{sha256}.{suffix}").read_bytes()
        assert hashlib.sha256(data).hexdigest() == sha256
        return data

    def _dequantized(self, group: dict[str, Any], parts: dict[str, Array], lead: str) -> KeysAndValues:
        held = self._layer(group, parts, lead)
        if f"{lead}rest.k.packed" not in parts:
            return held
        refined, rest = self.manifest["codec"]["refined"], self._layer(group, parts, f"{lead}rest.")
        for whole, part in zip(held, rest, strict=True):
            whole[:, :, :refined] += part
        return held

    def _layer(self, group: dict[str, Any], parts: dict[str, Array], lead: str) -> KeysAndValues:
        codec, found = self.manifest["codec"], []
        value_axis = codec["key_axis"] if group["latent"] else codec["value_axis"]
        for name, axis, dim in (("k", codec["key_axis"], "key_dim"), ("v", value_axis, "value_dim")):
            packed, scales, biases = (parts[f"{lead}{name}.{part}"] for part in ("packed", "scales", "biases"))
            shifts = np.arange(0, 32, codec["bits"], dtype=np.uint32)
            codes = (packed[..., None] >> shifts & (1 << codec["bits"]) - 1).reshape(*packed.shape[:-1], -1)
            scales, biases = (np.repeat(_float32(array), 64, axis=-1) for array in (scales, biases))
            values = codes.astype(np.float32) * scales + biases
            found.append(values.swapaxes(-1, -2) if axis == "token" or group[dim] % 64 else values)
        return tuple(found)


def _tensors(data: bytes) -> tuple[dict[str, str], dict[str, Array]]:
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    metadata, at = header.pop("__metadata__"), 8 + size
    arrays = {}
    for name, part in header.items():
        start, end = (at + offset for offset in part["data_offsets"])
        arrays[name] = np.frombuffer(data[start:end], DTYPES[part["dtype"]]).reshape(part["shape"])
    return metadata, arrays


def _float32(bfloat16: Array) -> Array:
    return (bfloat16.astype(np.uint32) << 16).view(np.float32)
