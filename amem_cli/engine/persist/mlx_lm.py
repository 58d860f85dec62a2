"""Reads and writes mlx-lm's prompt-cache files.

`export` writes dequantized keys and values in bfloat16, in the layout that mlx-lm's `load_prompt_cache` reads, with the
token ids in the metadata. `read` returns keys and values of such a file; `turns.import_mlx_lm` makes an agent of them.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache, load_prompt_cache

from amem_cli.engine.cache.agent_cache import AgentCache
from amem_cli.engine.cache.slabs import SlabPool
from amem_cli.engine.persist import cache_files
from kvstore.errors import ConflictError, DamageError, ModelMismatchError
from kvstore.format.block import encode_header
from kvstore.format.layers import Kind, LayerGroup
from kvstore.format.parts import Part
from kvstore.history.resolve import State
from kvstore.store import Store

_READABLE = {cls.__name__: cls for cls in (KVCache, RotatingKVCache, QuantizedKVCache)}
Pair = tuple[mx.array, mx.array]  # keys and values of one layer: [1, heads, tokens, dim]


def export(store: Store, state: State) -> Iterator[bytes]:
    """The bytes of a prompt-cache file of one state, piece by piece; the pending tokens are not in it.

    Raises ModelMismatchError for recurrent layers and for a state without a cache, DamageError, IsolationError.
    """
    manifest = state.manifest
    if any(group.kind not in _FORMS for group in manifest.groups):
        raise ModelMismatchError("a state with recurrent layers has no mlx-lm form that amem writes", "export as amem")
    if not manifest.cached:
        raise ConflictError(f"{state.ref} has no cache to export", "chat with it first, or export it as amem")
    tokens = store.tokens(manifest)
    cache = AgentCache(manifest.groups, manifest.codec, SlabPool())
    cache_files.load(store, manifest, cache, tokens).now()
    places = {layer: (part, i) for part in cache.with_blocks for i, layer in enumerate(part.group.layers)}
    layers = [(*places[layer], _form(places[layer][0].group, manifest.cached)) for layer in sorted(places)]
    parts = [part for place, (held, _, form) in enumerate(layers) for part in _parts(place, held.group, form)]
    known = {"model": manifest.model.name, "tokens": json.dumps(tokens[: manifest.cached].tolist()), "amem": "1"}
    yield encode_header(_metadata(known, [form for _, _, form in layers]), parts)
    for held, i, form in layers:
        for array in held.past(i, mx.bfloat16):
            yield _padded(array, form.tokens)
        yield b"".join(value.to_bytes(4, "little") for value in form.scalars)


@dataclass(frozen=True)
class _Form:
    """A layer's cache as mlx-lm has it: its class, the tokens in its arrays, and the scalars that follow them."""

    cls: type
    tokens: int
    scalars: tuple[int, ...]


def _full(group: LayerGroup, cached: int) -> _Form:  # noqa: ARG001
    return _Form(KVCache, cached, (cached,))


def _window(group: LayerGroup, cached: int) -> _Form:
    """A window that has wrapped is a full ring, whose oldest token is overwritten next."""
    assert group.window is not None
    tokens = min(cached, group.window)
    keep = 0
    return _Form(RotatingKVCache, tokens, (cached, keep, group.window, tokens))


_FORMS: dict[Kind, Callable[[LayerGroup, int], _Form]] = {"full": _full, "window": _window}


def _form(group: LayerGroup, cached: int) -> _Form:
    return _FORMS[group.kind](group, cached)


def _parts(place: int, group: LayerGroup, form: _Form) -> list[Part]:
    lead = (1, group.kv_heads, form.tokens)
    arrays = [Part(f"{place}.0", "BF16", (*lead, group.key_dim)), Part(f"{place}.1", "BF16", (*lead, group.value_dim))]
    return arrays + [Part(f"{place}.{n}", "I32", ()) for n, _ in enumerate(form.scalars, 2)]


def _metadata(known: dict[str, str], forms: Sequence[_Form]) -> dict[str, str]:
    """The file's metadata as mlx-lm flattens it: the user's, the classes, and which arrays are scalars."""
    classes = [form.cls.__name__ for form in forms]
    scalars = [(f"{place}.{n}", "scalar") for place, form in enumerate(forms) for n, _ in enumerate(form.scalars, 2)]
    return dict(cast(list[tuple[str, str]], tree_flatten([known, classes, ["", *scalars]])))


def _padded(array: mx.array, tokens: int) -> bytes:
    """Keys or values as bytes. A wrapped ring lacks its oldest token, which no later query sees: zeros instead."""
    missing = tokens - array.shape[2]
    if missing:
        array = mx.pad(array, [(0, 0), (0, 0), (missing, 0), (0, 0)])
    return np.array(mx.contiguous(array).view(mx.uint16)).tobytes()


def read(path: Path) -> tuple[list[Pair], dict[str, Any]]:
    """The keys and values of each layer, and the file's own metadata.

    Raises DamageError for a file that mlx-lm cannot read, ModelMismatchError for a cache that amem does not import.
    """
    try:
        _, metadata = cast(tuple[Any, dict[str, str]], mx.load(str(path), format="safetensors", return_metadata=True))
        classes = cast(list[Any], tree_unflatten(list(metadata.items())))[1]
        if unknown := sorted({str(name) for name in classes} - _READABLE.keys()):
            raise ModelMismatchError(f"{path} holds {', '.join(unknown)}, which amem does not import")
        caches, known = load_prompt_cache(str(path), return_metadata=True)
        return [_pair(cache, path) for cache in caches], known if isinstance(known, dict) else {}
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError) as error:
        raise DamageError(f"{path} is no prompt cache that this mlx-lm reads", "save it with mlx-lm again") from error


def _pair(cache: Any, path: Path) -> Pair:
    if isinstance(cache, RotatingKVCache) and (cache.keep or cache.offset > cache.max_size):
        raise ModelMismatchError(f"{path} holds a window that has moved on", "import one that still holds all tokens")
    keys, values = cache.keys, cache.values
    if isinstance(cache, QuantizedKVCache):
        group_size, bits = cache.group_size, cache.bits
        keys, values = (mx.dequantize(w, s, b, group_size=group_size, bits=bits) for w, s, b in (keys, values))
    if not keys.ndim == values.ndim == 4 or keys.shape[0] != 1 or not cache.offset <= keys.shape[2] == values.shape[2]:
        raise ModelMismatchError(f"{path} is not the cache of one conversation")
    return keys[:, :, : cache.offset], values[:, :, : cache.offset]
