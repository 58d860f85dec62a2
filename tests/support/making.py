"""Small agents made with NumPy, by the calls that the engine makes, and their reading back, byte for byte."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from kvstore.commit.journal import Actor, Entry, read_journal
from kvstore.commit.state import NewState, Rows, write_state
from kvstore.commit.transaction import Transaction
from kvstore.format.block import BlockHeader
from kvstore.format.codecs import CODECS, DEFAULT_CODEC
from kvstore.format.layers import LayerGroup, block_parts, tail_parts
from kvstore.format.layout import StoreLayout
from kvstore.format.manifest import Manifest, ModelIdentity
from kvstore.format.parts import BLOCK_TOKENS, Part
from kvstore.format.records import Domain
from kvstore.naming import new_id
from kvstore.store import Store

ACTOR = Actor.here(via="test", version="0", claimed="tester")
MODEL = ModelIdentity("tiny", "f" * 64, {"weights": "a" * 64})
CODEC = CODECS[DEFAULT_CODEC]
FULL = LayerGroup("full-0", "full", (0, 1), kv_heads=1, key_dim=64, value_dim=64)
WINDOW = LayerGroup("window-1", "window", (2,), kv_heads=1, key_dim=64, value_dim=64, window=300)
GROUPS = (FULL, WINDOW)


@contextmanager
def fast_folder() -> Iterator[Path]:
    """A folder in memory where there is one: some tests flush thousands of times, and a disk has nothing to add."""
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder)


def content(seed: str, parts: Sequence[Part]) -> list[memoryview]:
    """Bytes for each part that depend on `seed` only."""
    rng = np.random.default_rng(int(hashlib.sha256(seed.encode()).hexdigest()[:16], 16))
    return [memoryview(rng.bytes(part.nbytes)) for part in parts]


def block_content(tokens: Sequence[int], key: str, group: LayerGroup, position: int) -> list[memoryview]:
    ids = memoryview(np.asarray(tokens, dtype=np.int32).tobytes())
    return [ids, *content(key, block_parts(group, CODEC, position)[1:])]


def header(domain: Domain, group: LayerGroup, keys: Sequence[str], place: int) -> BlockHeader:
    parent = keys[place - 1] if place else ""
    position = place * BLOCK_TOKENS
    return BlockHeader(domain.id, MODEL.fingerprint, CODEC.name, group.id, position, keys[place], parent)


@dataclass(frozen=True)
class MadeUp:
    """The content of a state: numbers that depend on a block's prefix key and on a tail's tokens only."""

    state: NewState
    domain: Domain

    def block(self, group: LayerGroup, number: int) -> list[memoryview]:
        key = self.state.prefix_keys(self.domain, group)[number]
        return content(key, block_parts(group, self.state.codec, number * BLOCK_TOKENS)[1:])

    def tail(self) -> list[memoryview]:
        cached = self.state.tokens[: self.state.cached].tolist()
        return content(repr(cached), tail_parts(self.state.groups, self.state.codec, len(cached)))


def put_state(
    txn: Transaction, agent_id: str, previous: str | None, tokens: Sequence[int], complete: bool = True
) -> Manifest:
    """All files of a state but its manifest: every token but the last is cached. Blocks of its domain are found."""
    cached = len(tokens) - 1
    ids = np.asarray(tokens, dtype=np.int32)
    feeds = ((cached, 1),) if cached else ()
    state = NewState(agent_id, previous, "prefill", MODEL, CODEC, GROUPS, ids, cached, feeds, complete=complete)
    known: Rows = {}
    for group in GROUPS:
        found = txn.find(state.prefix_keys(txn.domain, group)[: cached // BLOCK_TOKENS])
        known |= {(group.id, number): row for number, row in enumerate(found) if row}
    manifest, _ = write_state(txn, state, MadeUp(state, txn.domain), known)
    return manifest


def commit(
    store: Store,
    name: str,
    tokens: Sequence[int],
    domain: Domain | None = None,
    wait: float = 10,
    complete: bool = True,
) -> str:
    """One turn of an agent, after which it has `tokens`."""
    with store.hold(name, wait) as hold:
        agent = hold.agent
        home = store.domain(agent.domain) if agent else domain or store.create_domain()
        before = agent.manifest if agent else None
        with store.transaction(home) as txn:
            manifest = put_state(txn, agent.id if agent else new_id(), before, tokens, complete)
            return txn.commit(hold, manifest, before)


def buffers_for(parts: Sequence[Part]) -> list[memoryview]:
    return [memoryview(bytearray(part.nbytes)) for part in parts]


def read_whole(store: Store, manifest: Manifest) -> list[int]:
    """The tokens of a state, once every block and the tail is read and is what was stored."""
    tokens: list[int] = store.tokens(manifest).tolist()
    groups = {group.id: group for group in GROUPS}
    for row in store.blocks(manifest):
        group = groups[row.group]
        parts = block_parts(group, CODEC, row.position)
        buffers = buffers_for(parts)
        store.read_block(manifest.domain, row, parts, buffers)
        own = tokens[row.position : row.position + BLOCK_TOKENS]
        assert buffers == block_content(own, row.prefix_key, group, row.position)
    if manifest.tail:
        parts = tail_parts(GROUPS, CODEC, manifest.cached)
        buffers = buffers_for(parts)
        store.read_tail(manifest, parts, buffers)
        assert buffers == content(repr(tokens[: manifest.cached]), parts)
    return tokens


def picture(root: Path) -> dict[str, list[int]]:
    """What a store holds: the tokens of each agent and snapshot. Empty where there is no store yet."""
    if not StoreLayout(root).format.exists():
        return {}
    store = Store.open(root, ACTOR)
    held = {}
    for agent in store.agents():
        held[agent.name] = read_whole(store, store.manifest(agent.domain, agent.manifest))
        for snapshot in store.snapshots(agent.name):
            manifest = store.manifest(snapshot.domain, snapshot.manifest)
            held[f"{agent.name}@{snapshot.name}"] = read_whole(store, manifest)
    return held


def journal(root: Path) -> list[Entry]:
    return list(read_journal(StoreLayout(root).journal))
