"""Agents as mlx-lm's prompt-cache files, and back.

Export writes keys and values in bfloat16, as the codes stand for them, in the layout that mlx-lm's
`load_prompt_cache` reads, with the token ids in its metadata. Import takes such a file's keys and values, quantizes
them in the passes that a prefill would make, and says how much that costs. Which model computed them a file cannot
prove, so the fingerprint of the model that the user names is recorded.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache, load_prompt_cache

from amem_cli.engine.cache.agent_cache import AgentCache
from amem_cli.engine.cache.feeder import Feeder, passes
from amem_cli.engine.cache.layer_cache import LayerGroupCache
from amem_cli.engine.cache.probe import ModelCacheSpec, describe
from amem_cli.engine.cache.slabs import SlabPool
from amem_cli.engine.models.load import load
from amem_cli.engine.models.registry import ModelEntry
from amem_cli.engine.persist import cache_files
from amem_cli.engine.prompt.transcript import Transcript
from amem_cli.engine.turns.agent_state import AgentState, AgentStates
from kvstore.errors import ConflictError, DamageError, ModelMismatchError, UsageError
from kvstore.format.block import encode_header
from kvstore.format.codecs import CODECS, DEFAULT_CODEC
from kvstore.format.feeds import add_feed
from kvstore.format.layers import LayerGroup
from kvstore.format.manifest import ModelIdentity, Turn
from kvstore.format.parts import Part
from kvstore.history.resolve import State
from kvstore.naming import new_id
from kvstore.store import Store

_READABLE = {cls.__name__: cls for cls in (KVCache, RotatingKVCache, QuantizedKVCache)}
Pair = tuple[mx.array, mx.array]  # keys and values of one layer: [1, heads, tokens, dim]


@dataclass(frozen=True)
class Loss:
    """What quantization cost: the root mean square error of keys and values over their own root mean square."""

    keys: float
    values: float


@dataclass(frozen=True)
class ImportedPromptCache:
    """What an import made: the agent's first state."""

    agent: str
    agent_id: str
    domain: str
    manifest: str
    model: ModelIdentity
    tokens: int
    cached: int
    loss: Loss


def export(store: Store, state: State) -> Iterator[bytes]:
    """The bytes of a prompt-cache file of one state, piece by piece; the pending tokens are not in it.

    Raises ModelMismatchError for recurrent layers and for a state without a cache, DamageError, IsolationError.
    """
    manifest = state.manifest
    if any(group.kind == "recurrent" for group in manifest.groups):
        raise ModelMismatchError("a state with recurrent layers has no mlx-lm form that amem writes", "export as amem")
    if not manifest.cached:
        raise ConflictError(f"{state.ref} has no cache to export", "chat with it first, or export it as amem")
    tokens = store.tokens(manifest)
    cache = AgentCache(manifest.groups, manifest.codec, SlabPool())
    cache_files.load(store, manifest, cache, tokens).now()
    places = {layer: (group, i) for group in cache.groups for i, layer in enumerate(group.group.layers)}
    layers = [places[layer] for layer in sorted(places)]
    parts = [part for place, (group, _) in enumerate(layers) for part in _parts(place, group.group, manifest.cached)]
    known = {"model": manifest.model.name, "tokens": json.dumps(tokens[: manifest.cached].tolist()), "amem": "1"}
    yield encode_header(_metadata(known, [group.group for group, _ in layers]), parts)
    for group, i in layers:
        for array in group.past(i, mx.bfloat16):
            yield _padded(array, group.group, manifest.cached)
        yield b"".join(value.to_bytes(4, "little") for value in _scalars(group.group, manifest.cached))


def _held(group: LayerGroup, cached: int) -> int:
    """Tokens in a layer's arrays: a window that has wrapped is a full ring, whose oldest token is overwritten next."""
    return cached if group.window is None else min(cached, group.window)


def _scalars(group: LayerGroup, cached: int) -> list[int]:
    """What follows keys and values in a cache's state: offset, and for a window keep, max_size and the next place."""
    return [cached] if group.window is None else [cached, 0, group.window, _held(group, cached)]


def _parts(place: int, group: LayerGroup, cached: int) -> list[Part]:
    lead = (1, group.kv_heads, _held(group, cached))
    arrays = [Part(f"{place}.0", "BF16", (*lead, group.key_dim)), Part(f"{place}.1", "BF16", (*lead, group.value_dim))]
    scalars = _scalars(group, cached)
    return arrays + [Part(f"{place}.{n}", "I32", ()) for n in range(2, 2 + len(scalars))]


def _metadata(known: dict[str, str], groups: Sequence[LayerGroup]) -> dict[str, str]:
    """The file's metadata as mlx-lm flattens it: the user's, the classes, and which arrays are scalars."""
    classes = ["KVCache" if group.window is None else "RotatingKVCache" for group in groups]
    counts = [len(_scalars(group, 1)) for group in groups]
    scalars = [(f"{place}.{n}", "scalar") for place, count in enumerate(counts) for n in range(2, 2 + count)]
    return dict(cast(list[tuple[str, str]], tree_flatten([known, classes, ["", *scalars]])))


def _padded(array: mx.array, group: LayerGroup, cached: int) -> bytes:
    """Keys or values as bytes. A wrapped ring lacks its oldest token, which no later query sees: zeros stand there."""
    missing = _held(group, cached) - array.shape[2]
    if missing:
        array = mx.pad(array, [(0, 0), (0, 0), (missing, 0), (0, 0)])
    return np.array(mx.contiguous(array).view(mx.uint16)).tobytes()


def import_file(
    store: Store,
    entry: ModelEntry,
    cache_dir: Path,
    path: Path,
    name: str,
    *,
    tokens: Sequence[int] | None = None,
    domain: str | None = None,
    wait: float = 0.0,
) -> ImportedPromptCache:
    """Make a new agent of the prompt-cache file `path`, which the model of `entry` is said to have computed.

    `tokens` are the ids of all its tokens, by default those in the file's metadata; the last one, and what goes beyond
    the cache, is pending. Raises DamageError for a file that mlx-lm cannot read, ModelMismatchError for caches of
    another model or kind, UsageError where the ids are missing or too few, ConflictError, BusyError.
    """
    pairs, known = _read(path)
    ids = _ids(tokens, known)
    with store.hold(name, wait) as hold:
        if hold.agent:
            raise ConflictError(f"there is an agent {name}", "give another name behind the file")
        model = load(entry, cache_dir)
        spec = describe(model.model)
        cached = min(_check(pairs, spec), len(ids) - 1)
        _check_ids(ids, cached, pairs, model.config)
        home = store.create_domain(domain)
        cache = spec.new_cache(CODECS[DEFAULT_CODEC], SlabPool())
        transcript = Transcript(ids, [Turn("raw", 0, len(ids))])
        agent = AgentState(new_id(), home, cache.codec, transcript, Feeder(model.model, cache))
        _fill(agent, pairs, cached)
        loss = _loss(cache.groups, pairs, cached)
        with store.transaction(home) as txn:
            digest = AgentStates(store, model, spec).commit(agent, hold, txn, "import")
        cache.release()
    return ImportedPromptCache(
        name, agent.agent_id, home.name or home.id, digest, model.identity, len(ids), cached, loss
    )


def _read(path: Path) -> tuple[list[Pair], dict[str, Any]]:
    """The keys and values of each layer, and the file's own metadata."""
    try:
        _, metadata = cast(tuple[Any, dict[str, str]], mx.load(str(path), format="safetensors", return_metadata=True))
        classes = cast(list[Any], tree_unflatten(list(metadata.items())))[1]
        if strangers := sorted({str(name) for name in classes} - _READABLE.keys()):
            raise ModelMismatchError(f"{path} holds {', '.join(strangers)}, which amem does not import")
        caches, known = load_prompt_cache(str(path), return_metadata=True)
        return [_pair(cache, path) for cache in caches], known or {}
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


def _ids(tokens: Sequence[int] | None, known: dict[str, Any]) -> list[int]:
    """The token ids that the user gave, else those in the metadata."""
    found = tokens if tokens is not None else json.loads(known.get("tokens", "null"))
    if not isinstance(found, Sequence) or not found or not all(type(token) is int for token in found):
        raise UsageError("the file does not hold its token ids", "give them with --tokens FILE")
    return list(found)


def _check(pairs: list[Pair], spec: ModelCacheSpec) -> int:
    """How many tokens the layers hold. Raises ModelMismatchError where they are not the model's."""
    looks = {layer: (g.kv_heads, g.key_dim, g.value_dim) for g in spec.groups for layer in g.layers}
    there = [(keys.shape[1], keys.shape[3], values.shape[3]) for keys, values in pairs]
    recurrent = any(group.kind == "recurrent" for group in spec.groups)
    if recurrent or there != [looks[layer] for layer in sorted(looks)]:
        raise ModelMismatchError("the file's layers are not those of the model", "name the model that made it")
    lengths = {keys.shape[2] for keys, _ in pairs}
    if len(lengths) != 1:
        raise ModelMismatchError("the file's layers hold different numbers of tokens")
    return lengths.pop()


def _check_ids(ids: list[int], cached: int, pairs: list[Pair], config: dict[str, Any]) -> None:
    held = pairs[0][0].shape[2]
    if len(ids) < held:
        raise UsageError(f"the file holds {held} tokens, and only {len(ids)} ids were given", "give all of them")
    if not cached:
        raise UsageError("the file holds too few tokens", "an agent has one token at least in its cache")
    vocabulary = config.get("vocab_size", 1 << 31)
    if not all(0 <= token < vocabulary for token in ids):
        raise UsageError("the token ids are not the model's", "give the ids that its tokenizer made")


def _fill(agent: AgentState, pairs: list[Pair], cached: int) -> None:
    """Take keys and values in, in the passes that a prefill of them would make."""
    cache, start = agent.feeder.cache, 0
    for length in passes(0, cached, logits=False):
        for group in cache.groups:
            for i, layer in enumerate(group.group.layers):
                keys, values = pairs[layer]
                group.fresh[i] = keys[:, :, start : start + length], values[:, :, start : start + length]
        cache.settle(length)
        agent.feeder.feeds = add_feed(agent.feeder.feeds, length)
        start += length


def _loss(groups: Sequence[LayerGroupCache], pairs: list[Pair], cached: int) -> Loss:
    """What the codes lost of the tokens that the layers can still see."""
    errors, sizes = np.zeros(2), np.zeros(2)
    for group in groups:
        for i, layer in enumerate(group.group.layers):
            for side, kept in enumerate(group.past(i, mx.float32)):
                given = pairs[layer][side][:, :, :cached].astype(mx.float32)[:, :, -kept.shape[2] :]
                errors[side] += mx.square(kept - given).sum().item()
                sizes[side] += mx.square(given).sum().item()
    keys, values = np.sqrt(errors / np.maximum(sizes, 1e-30)).tolist()
    return Loss(keys, values)
