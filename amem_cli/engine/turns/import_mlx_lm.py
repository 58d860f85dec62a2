"""A new agent from an mlx-lm prompt-cache file: its keys and values are quantized in the passes of a prefill.

A file cannot prove which model computed it: the fingerprint of the model that the user names is recorded.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from amem_cli.engine.cache.block_cache import BlockCache
from amem_cli.engine.cache.feeder import Feeder, passes
from amem_cli.engine.cache.probe import ModelCacheSpec, describe
from amem_cli.engine.cache.slabs import SlabPool
from amem_cli.engine.models.load import load
from amem_cli.engine.models.registry import ModelEntry
from amem_cli.engine.persist import mlx_lm
from amem_cli.engine.persist.mlx_lm import Pair
from amem_cli.engine.prompt.transcript import Transcript
from amem_cli.engine.turns.agent_state import AgentState, AgentStates
from kvstore.errors import ConflictError, ModelMismatchError, UsageError
from kvstore.format.codecs import CODECS, DEFAULT_CODEC
from kvstore.format.feeds import add_feed
from kvstore.format.manifest import ModelIdentity, Turn
from kvstore.naming import new_id
from kvstore.store import Store


@dataclass(frozen=True)
class Loss:
    """The root mean square error of quantized keys and values, over their own root mean square."""

    keys: float
    values: float


@dataclass(frozen=True)
class ImportedPromptCache:
    """The first state of the imported agent."""

    agent: str
    agent_id: str
    domain: str
    manifest: str
    model: ModelIdentity
    tokens: int
    cached: int
    loss: Loss


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
    """Make a new agent of the prompt-cache file `path`. The user says that the model of `entry` computed it.

    `tokens` are the ids of all its tokens, by default those in the file's metadata; the last one, and those beyond the
    cache, are pending. Raises DamageError for a file that mlx-lm cannot read, ModelMismatchError for caches of another
    model or kind, UsageError for missing or too few ids, ConflictError, BusyError.
    """
    pairs, known = mlx_lm.read(path)
    ids = _ids(tokens, known)
    with store.hold(name, wait) as hold:
        if hold.agent:
            raise ConflictError(f"there is an agent {name}", "give another name after the file")
        model = load(entry, cache_dir)
        spec = describe(model.model)
        cached = min(_check(pairs, spec), len(ids) - 1)
        _check_ids(ids, cached, pairs, model.config)
        home = store.create_domain(domain)
        cache = spec.new_cache(CODECS[DEFAULT_CODEC], SlabPool())
        transcript = Transcript(ids, [Turn("raw", 0, len(ids))])
        agent = AgentState(new_id(), home, cache.codec, transcript, Feeder(model.model, cache))
        _fill(agent, pairs, cached)
        loss = _loss(cache.with_blocks, pairs, cached)
        with store.transaction(home) as txn:
            digest = AgentStates(store, model, spec).commit(agent, hold, txn, "import")
        cache.release()
    return ImportedPromptCache(
        name, agent.agent_id, home.name or home.id, digest, model.identity, len(ids), cached, loss
    )


def _ids(tokens: Sequence[int] | None, known: dict[str, Any]) -> list[int]:
    """The user's token ids, else those in the metadata."""
    found = tokens if tokens is not None else _parsed(known.get("tokens"))
    if not isinstance(found, Sequence) or not found or not all(type(token) is int for token in found):
        raise UsageError("the file does not hold its token ids", "give them with --tokens FILE")
    return list(found)


def _parsed(text: object) -> object:
    """The value of a JSON text in a file's metadata; None for anything else."""
    try:
        return json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return None


def _check(pairs: list[Pair], spec: ModelCacheSpec) -> int:
    """How many tokens the layers hold. Raises ModelMismatchError for layers of another model."""
    expected = {layer: (g.kv_heads, g.key_dim, g.value_dim) for g in spec.groups for layer in g.layers}
    held = [(keys.shape[1], keys.shape[3], values.shape[3]) for keys, values in pairs]
    recurrent = not all(group.layer_kind.has_blocks for group in spec.groups)
    if recurrent or held != [expected[layer] for layer in sorted(expected)]:
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
    """Take in keys and values, in the passes of a prefill."""
    cache, start = agent.feeder.cache, 0
    for length in passes(0, cached, logits=False):
        for part in cache.with_blocks:
            for i, layer in enumerate(part.group.layers):
                keys, values = pairs[layer]
                part.fresh[i] = keys[:, :, start : start + length], values[:, :, start : start + length]
        cache.settle(length)
        agent.feeder.feeds = add_feed(agent.feeder.feeds, length)
        start += length


def _loss(parts: Sequence[BlockCache], pairs: list[Pair], cached: int) -> Loss:
    """The quantization error of the tokens that the layers can still see."""
    errors, sizes = np.zeros(2), np.zeros(2)
    for part in parts:
        for i, layer in enumerate(part.group.layers):
            for side, kept in enumerate(part.past(i, mx.float32)):
                given = pairs[layer][side][:, :, :cached].astype(mx.float32)[:, :, -kept.shape[2] :]
                errors[side] += mx.square(kept - given).sum().item()
                sizes[side] += mx.square(given).sum().item()
    keys, values = np.sqrt(errors / np.maximum(sizes, 1e-30)).tolist()
    return Loss(keys, values)
