"""Prompt-cache files against mlx-lm's own reader and writer, on tiny models of each kind."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
)

from amem_cli.engine.cache.feeder import passes
from amem_cli.engine.cache.probe import describe
from amem_cli.engine.models.load import LoadedModel, load
from amem_cli.engine.models.registry import ModelEntry
from amem_cli.engine.persist.mlx_lm import export
from amem_cli.engine.prompt.transcript import Text, Transcript
from amem_cli.engine.turns.agent_state import AgentStates
from amem_cli.engine.turns.engine import Engine
from amem_cli.engine.turns.import_mlx_lm import ImportedPromptCache, import_file
from amem_cli.engine.turns.requests import Generation
from amem_cli.engine.turns.steps import drive
from kvstore.commit.journal import Actor
from kvstore.errors import ConflictError, DamageError, ModelMismatchError, UsageError
from kvstore.format.codecs import CODECS, DEFAULT_CODEC
from kvstore.history.resolve import State
from kvstore.naming import Ref
from kvstore.store import Store
from tests.support.models.chat import WINDOW, Kind, tiny_model

IDS = [(7 * n) % 250 + 4 for n in range(400)]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open_or_create(tmp_path / "store", Actor.here("test", "0"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[Kind, LoadedModel]:
    made: dict[Kind, LoadedModel] = {}
    for kind in ("llama", "gemma3_text"):
        folder = tiny_model(kind, tmp_path_factory.mktemp(kind))
        made[kind] = load(entry(folder), folder.parent)
    return made


@pytest.fixture
def llama(models: dict[Kind, LoadedModel]) -> LoadedModel:
    return models["llama"]


def entry(folder: Path) -> ModelEntry:
    return ModelEntry(str(folder), str(folder), "folder", folder)


def prefilled(store: Store, model: LoadedModel, cached: int) -> tuple[AgentStates, State]:
    """The agent `a`, of the first tokens of IDS; one more is pending."""
    conversations = AgentStates(store, model, describe(model.model))
    home = store.create_domain()
    with store.hold("a", 0) as hold, store.transaction(home) as txn:
        agent = drive(conversations.begin(home, CODECS[DEFAULT_CODEC], Transcript(IDS[: cached + 1]), txn))
        for length in passes(0, cached, logits=False):
            agent.feeder.feed(agent.pending[:length])
        conversations.commit(agent, hold, txn, "prefill")
    return conversations, store.resolve(Ref("a"))


def saved(model: LoadedModel, path: Path, tokens: int, *, bits: int | None = None, known: bool = True) -> Path:
    """What mlx-lm saves of a conversation that has fed `tokens` of IDS."""
    cache = make_prompt_cache(model.model)
    model.model(mx.array([IDS[:tokens]]), cache=cache)
    if bits:
        cache = [layer.to_quantized(bits=bits) for layer in cache]
    save_prompt_cache(str(path), cache, {"tokens": json.dumps(IDS[:tokens])} if known else {})
    return path


def brought(store: Store, path: Path, model: LoadedModel, **options: Any) -> ImportedPromptCache:
    return import_file(store, entry(model.folder), model.folder.parent, path, "a", **options)


def root_mean_square(array: mx.array) -> float:
    return float(np.sqrt(np.square(np.array(array.astype(mx.float32))).mean()))


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
@pytest.mark.parametrize("length", [1, 40, WINDOW - 1, WINDOW, WINDOW + 1, 300])
def test_mlx_lm_goes_on_from_an_export(
    store: Store, models: dict[Kind, LoadedModel], tmp_path: Path, kind: Kind, length: int
) -> None:
    model = models[kind]
    conversations, state = prefilled(store, model, length)
    path = tmp_path / "exported.safetensors"
    path.write_bytes(b"".join(export(store, state)))
    caches, known = load_prompt_cache(str(path), return_metadata=True)
    assert json.loads(known["tokens"]) == IDS[:length]
    assert {cache.offset for cache in caches} == {length}
    assert {type(cache) for cache in caches} == ({KVCache} if kind == "llama" else {KVCache, RotatingKVCache})
    agent = drive(conversations.resume(state))
    fed = [[IDS[length]], IDS[10:12], IDS[20:21], IDS[30:31]]
    for passed in fed[:1] if length == WINDOW - 1 else fed:  # ours quantizes a group of 64 once it is whole
        ours = agent.feeder.feed(passed, logits=True)
        theirs = model.model(mx.array([passed]), cache=caches)[0, -1]
        assert ours is not None
        # ours keeps new keys and values in bfloat16, mlx-lm in float32
        assert root_mean_square(ours - theirs) < 0.05 * root_mean_square(ours)


@pytest.mark.parametrize("bits", [None, 4, 8])
def test_an_imported_cache_is_an_agent(store: Store, llama: LoadedModel, tmp_path: Path, bits: int | None) -> None:
    made = brought(store, saved(llama, tmp_path / "c.safetensors", 300, bits=bits), llama)
    assert (made.tokens, made.cached) == (300, 299)  # the last token is fed again
    assert 0 < made.loss.keys < 0.2 and 0 < made.loss.values < 0.2
    manifest = store.resolve(Ref("a")).manifest
    assert (manifest.op, manifest.model, manifest.feeds) == ("import", llama.identity, ((256, 1), (43, 1)))
    assert store.tokens(manifest).tolist() == IDS[:300]
    engine = Engine(store, entry(llama.folder), llama.folder.parent)
    turn = engine.chat(Ref("a"), [Text("and so", raw=True)], Generation(max_tokens=3))
    assert turn.reused == 299


def test_keys_and_values_survive_the_way_there_and_back(store: Store, llama: LoadedModel, tmp_path: Path) -> None:
    made = brought(store, saved(llama, tmp_path / "c.safetensors", 300), llama)
    path = tmp_path / "back.safetensors"
    path.write_bytes(b"".join(export(store, store.resolve(Ref("a")))))
    there, back = (load_prompt_cache(str(p)) for p in (tmp_path / "c.safetensors", path))
    for old, new in zip(there, back, strict=True):
        error = old.keys[:, :, :299] - new.keys
        assert 0 < root_mean_square(error) < 3 * made.loss.keys * root_mean_square(new.keys)
        assert root_mean_square(error[:, :, 256:]) < 0.01 * root_mean_square(new.keys)  # recent ones: in bfloat16


def test_tokens_beyond_the_cache_are_pending(store: Store, llama: LoadedModel, tmp_path: Path) -> None:
    path = saved(llama, tmp_path / "c.safetensors", 300, known=False)
    with pytest.raises(UsageError, match="token ids"):
        brought(store, path, llama)
    with pytest.raises(UsageError, match="only 299"):
        brought(store, path, llama, tokens=IDS[:299])
    with pytest.raises(UsageError, match="not the model's"):
        brought(store, path, llama, tokens=[*IDS[:299], 10**6])
    made = brought(store, path, llama, tokens=IDS)
    assert (made.tokens, made.cached) == (400, 300)
    with pytest.raises(ConflictError):
        brought(store, path, llama, tokens=IDS)


def test_windows_come_before_they_wrap(store: Store, models: dict[Kind, LoadedModel], tmp_path: Path) -> None:
    gemma = models["gemma3_text"]
    assert brought(store, saved(gemma, tmp_path / "c.safetensors", WINDOW), gemma).cached == WINDOW - 1
    wrapped = saved(gemma, tmp_path / "w.safetensors", WINDOW + 40)
    with pytest.raises(ModelMismatchError, match="moved on"):
        brought(store, wrapped, gemma)


def test_what_is_of_another_model_or_kind_is_refused(
    store: Store, models: dict[Kind, LoadedModel], llama: LoadedModel, tmp_path: Path
) -> None:
    with pytest.raises(ModelMismatchError, match="not those of the model"):
        brought(store, saved(llama, tmp_path / "c.safetensors", 30), models["gemma3_text"])
    other = ArraysCache(1)
    other[0] = mx.zeros((1, 4))
    save_prompt_cache(str(tmp_path / "o.safetensors"), [other], {"tokens": "[1, 2]"})
    with pytest.raises(ModelMismatchError, match="ArraysCache"):
        brought(store, tmp_path / "o.safetensors", llama)
    quantized = QuantizedKVCache(bits=4)
    quantized.update_and_fetch(mx.zeros((2, 2, 4, 64)), mx.zeros((2, 2, 4, 64)))
    save_prompt_cache(str(tmp_path / "q.safetensors"), [quantized], {"tokens": "[1, 2, 3, 4]"})
    with pytest.raises(ModelMismatchError, match="one conversation"):
        brought(store, tmp_path / "q.safetensors", llama)
    (tmp_path / "x.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(DamageError):
        brought(store, tmp_path / "x.safetensors", llama)
    mx.save_safetensors(str(tmp_path / "m.safetensors"), {"a": mx.zeros(3)})
    with pytest.raises(DamageError):
        brought(store, tmp_path / "m.safetensors", llama)
    assert store.agents() == []
