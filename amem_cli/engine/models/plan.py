"""How much memory agents of a model will take, from its `config.json` alone.

The model's own class is built with weights that MLX never computes, and its cache is probed as that of a loaded model.
This takes a few megabytes, whatever the model's size.
"""

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.utils import _get_classes

from amem_cli.engine.cache.agent_cache import footprint
from amem_cli.engine.cache.latent_attention import absorb
from amem_cli.engine.cache.probe import ModelCacheSpec, describe
from amem_cli.engine.models import paper
from amem_cli.engine.models.folder import read_config, read_config_file
from amem_cli.engine.models.registry import find
from amem_cli.engine.models.sources import materialize
from kvstore.errors import ModelMismatchError, NotFoundError
from kvstore.format.codecs import Codec
from kvstore.format.layers import LayerGroup, bytes_per_token, fp16_bytes_per_token, state_parts
from kvstore.format.layout import StoreLayout

_CHECK_CONFIG = "check its config.json"
# what a model's code raises for a config of another model
_BROKEN = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class GroupReport:
    """A layer group, how decode reads it (by handle, as arrays, as states), and the bytes of one token of it."""

    id: str
    kind: str
    layers: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    latent: bool
    served: str
    fp16_bytes_per_token: int
    bytes_per_token: float
    state_bytes: int  # of a recurrent group, whatever the length


@dataclass(frozen=True)
class Kept:
    """Memory of an agent of `tokens` tokens: in float16 with the whole context, and as amem keeps it."""

    tokens: int
    fp16_bytes: int
    bytes: int


@dataclass(frozen=True)
class MemoryLayout:
    """A format of an agent's cache, the bytes of an agent in it, and how many agents fit."""

    name: str
    what: str
    bytes: int
    agents: int


def config_of(layout: StoreLayout, text: str, cache: Path) -> dict[str, Any]:
    """The config of the model that `text` names, or of the JSON file at that path. Nothing is fetched.

    Raises NotFoundError and ModelMismatchError.
    """
    path = Path(text).expanduser()
    if path.suffix == ".json":
        if not path.is_file():
            raise NotFoundError(f"no file {path}", "give a model, or the path of its config.json")
        return read_config_file(path)
    entry = find(layout, text)
    return read_config(_local(entry.source) if entry.kind == "hub" else materialize(entry, cache))


def _local(repository: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, local_files_only=True))
    except (OSError, ValueError) as error:
        raise NotFoundError(f"{repository} is not on this machine", "give the path of its config.json") from error


def describe_config(config: dict[str, Any]) -> ModelCacheSpec:
    """The cache of the model with this config. Raises ModelMismatchError for a model that amem does not serve."""
    model = _unloaded(config)
    absorb(model)
    return describe(model)


def plain_groups(config: dict[str, Any]) -> tuple[LayerGroup, ...]:
    """The layer groups of mlx-lm's own caches, as the paper counts: latents may be expanded.

    Raises as `describe_config`.
    """
    return describe(_unloaded(config)).groups


def _unloaded(config: dict[str, Any]) -> Module:
    """The model, with weights that are never computed, in the type in which it runs on this machine."""
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise ModelMismatchError("this config names no model_type", _CHECK_CONFIG)
    try:
        model_class, args_class = _get_classes(config)
    except _BROKEN as error:
        raise ModelMismatchError(f"mlx-lm has no model of the type {kind!r}", _CHECK_CONFIG) from error
    try:
        model: Module = model_class(args_class.from_dict(config))
        model.set_dtype(_dtype(config))
    except _BROKEN as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        absent = ", ".join(_absent(config, args_class))
        problem = f"lacks {absent}" if absent else f"does not make a model of the type {kind!r}: {reason}"
        raise ModelMismatchError(f"this config {problem}", _CHECK_CONFIG) from error
    return model


def _absent(config: dict[str, Any], args_class: Any) -> list[str]:
    """Fields without a default that the config lacks."""
    wanted = fields(args_class) if is_dataclass(args_class) else ()
    needed = (field.name for field in wanted if field.default is MISSING and field.default_factory is MISSING)
    return [name for name in needed if name not in config]


def _dtype(config: dict[str, Any]) -> mx.Dtype:
    values = {**(config.get("text_config") or {}), **config}
    named = str(values.get("dtype") or values.get("torch_dtype"))
    on_cpu = mx.default_device().type == mx.DeviceType.cpu  # where weights are cast to float32 as they are loaded
    return mx.float32 if on_cpu else {"float16": mx.float16, "float32": mx.float32}.get(named, mx.bfloat16)


def report(spec: ModelCacheSpec, codec: Codec) -> list[GroupReport]:
    """Each layer group of a model, and its memory."""
    return [
        GroupReport(
            id=group.id,
            kind=group.kind,
            layers=len(group.layers),
            kv_heads=group.kv_heads,
            key_dim=group.key_dim,
            value_dim=group.value_dim,
            window=group.window,
            latent=group.latent,
            served=_served(group, spec.arrays_only),
            fp16_bytes_per_token=fp16_bytes_per_token(group),
            bytes_per_token=bytes_per_token(group, codec),
            state_bytes=_states([group]),
        )
        for group in spec.groups
    ]


def _served(group: LayerGroup, arrays_only: frozenset[int]) -> str:
    if not group.layer_kind.has_blocks:
        return "states"
    return "arrays" if arrays_only.issuperset(group.layers) else "handle"


def kept(groups: Sequence[LayerGroup], codec: Codec, tokens: int) -> Kept:
    """The memory of an agent of `tokens` tokens."""
    return Kept(tokens, fp16_bytes(groups, tokens), footprint(groups, codec, tokens))


def layouts(config: dict[str, Any], codec: Codec, context: int, memory: int) -> list[MemoryLayout]:
    """Agents of `context` tokens in `memory` bytes: in float16, in the paper's layout, and as amem keeps them.

    The first two are the paper's formulas (arXiv 2603.04428, section 3): 2 bytes an element, and 0.281 times that.
    Raises ModelMismatchError.
    """
    plain, groups = plain_groups(config), describe_config(config).groups
    expanded = "" if plain == groups else ", latents expanded"
    q4 = sum(paper.bytes_per_token(group) for group in plain)
    sizes = [
        ("float16", f"all layers, the whole context{expanded}", fp16_bytes(plain, context)),
        ("4 bits", "the same, in the paper's layout", round(q4 * context) + _states(plain)),
        ("amem", f"what a cache really allocates, in {codec.name}", footprint(groups, codec, context)),
    ]
    return [MemoryLayout(name, what, size, memory // size if size else 0) for name, what, size in sizes]


def fp16_bytes(groups: Sequence[LayerGroup], context: int) -> int:
    """Bytes of a cache in float16 that keeps all of the context in every layer."""
    return sum(fp16_bytes_per_token(group) for group in groups) * context + _states(groups)


def _states(groups: Sequence[LayerGroup]) -> int:
    return sum(part.nbytes for group in groups for part in state_parts(group))
