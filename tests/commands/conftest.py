"""Runs the real command, on real stores whose agents hold a few small blocks."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvstore.commit.journal import Actor
from kvstore.disk.clock import timestamp
from kvstore.format.block import BlockHeader
from kvstore.format.codecs import CODECS, DEFAULT_CODEC
from kvstore.format.layers import LayerGroup, block_parts
from kvstore.format.manifest import Manifest, ModelIdentity, Page, Turn, features_of
from kvstore.format.parts import BLOCK_TOKENS
from kvstore.format.prefix_keys import prefix_chain
from kvstore.naming import new_id
from kvstore.store import Store
from tests.support.running.amem import Amem, Done, in_own_process, in_this_process

GROUP = LayerGroup("full-0", "full", (0, 1), kv_heads=1, key_dim=64, value_dim=64)
CODEC = CODECS[DEFAULT_CODEC]
MODEL = ModelIdentity("tiny", "f" * 32, {"weights": "1" * 32, "config": "2" * 32})
ACTOR = Actor.here("test", "0")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A user's environment of its own: nothing outside of tmp_path is read or written, and no store is named."""
    own = ("AMEM_", "XDG_", "NO_COLOR")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(own)}
    folders = {f"XDG_{kind}_HOME": str(tmp_path / kind.lower()) for kind in ("DATA", "CONFIG", "CACHE", "STATE")}
    return {**kept, **folders, "HOME": str(tmp_path), "AMEM_STORE": str(tmp_path / "store")}


@pytest.fixture
def amem(environment: dict[str, str], tmp_path: Path) -> Amem:
    """`amem` in this process: for all that a command reads, writes and answers."""

    def run(*arguments: str, stdin: bytes | None = None, env: dict[str, str] | None = None) -> Done:
        return in_this_process(*arguments, stdin=stdin or b"", env={**environment, **(env or {})}, cwd=tmp_path)

    return run


@pytest.fixture
def amem_process(environment: dict[str, str], tmp_path: Path) -> Amem:
    """`amem` in a process of its own: where the process is the point."""

    def run(*arguments: str, stdin: bytes | None = None, env: dict[str, str] | None = None) -> Done:
        return in_own_process(*arguments, stdin=stdin or b"", env={**environment, **(env or {})}, cwd=tmp_path)

    return run


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store with the agent `a`: two states, of 300 and 700 tokens."""
    made = Store.open_or_create(tmp_path / "store", ACTOR)
    put_state(made, "a", range(300))
    put_state(made, "a", range(700))
    return made


def put_state(store: Store, name: str, tokens: Sequence[int], complete: bool = True) -> str:
    """Commit a state of these tokens as the head of an agent; its blocks hold made-up numbers. Returns its digest."""
    with store.hold(name, wait=1) as hold:
        before = hold.agent.manifest if hold.agent else None
        domain = store.domain(hold.agent.domain) if hold.agent else store.create_domain()
        ids = np.array(tokens, np.int32)
        with store.transaction(domain) as transaction:
            rows, parent = [], ""
            for place, key in enumerate(prefix_chain(domain.salt, MODEL.fingerprint, CODEC.name, GROUP.id, ids)):
                start = place * BLOCK_TOKENS
                header = BlockHeader(domain.id, MODEL.fingerprint, CODEC.name, GROUP.id, start, key, parent)
                parts = block_parts(GROUP, CODEC, start)
                numbers = np.random.default_rng(place)
                buffers = [ids[start : start + BLOCK_TOKENS].tobytes()]
                buffers += [numbers.bytes(part.nbytes) for part in parts[1:]]
                rows.append(transaction.put_block(header, buffers, parts))
                parent = key
            page = transaction.put_page(Page(0, tuple(int(token) for token in tokens), tuple(rows), domain.salt))
            manifest = Manifest(
                agent=hold.agent.id if hold.agent else new_id(),
                domain=domain.id,
                salt=domain.salt,
                previous=before,
                resumes=None,
                op="prefill",
                model=MODEL,
                codec=CODEC,
                groups=(GROUP,),
                tokens=len(tokens),
                cached=len(tokens) - 1,
                pages=(page,),
                window_blocks=(),
                tail=None,
                feeds=(),
                turns=(Turn("user", 0, len(tokens)),),
                owed=(),
                stop=None,
                sampling=None,
                complete=complete,
                created=timestamp(),
                features=features_of(CODEC),
            )
            return transaction.commit(hold, manifest, before)
