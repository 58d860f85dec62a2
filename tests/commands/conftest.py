"""Runs the real command, on real stores whose agents hold a few small blocks."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvstore.commit.journal import Actor
from kvstore.commit.state import NewState, write_state
from kvstore.format.codecs import CODECS, DEFAULT_CODEC
from kvstore.format.layers import LayerGroup, block_parts, tail_parts
from kvstore.format.manifest import ModelIdentity, Turn
from kvstore.format.parts import BLOCK_TOKENS, Part
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


@pytest.fixture(scope="session")
def model(endless: Path) -> Path:
    """The model of commands' tests: its answers never end by themselves."""
    return endless


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
        agent_id, turn = hold.agent.id if hold.agent else new_id(), Turn("user", 0, len(tokens))
        state = NewState(
            agent=agent_id,
            previous=before,
            op="prefill",
            model=MODEL,
            codec=CODEC,
            groups=(GROUP,),
            tokens=np.array(tokens, np.int32),
            cached=len(tokens) - 1,
            turns=(turn,),
            complete=complete,
        )
        with store.transaction(domain) as transaction:
            manifest, _ = write_state(transaction, state, _Numbers(state))
            return transaction.commit(hold, manifest, before)


class _Numbers:
    """Made-up content of a state."""

    def __init__(self, state: NewState) -> None:
        self._state = state

    def block(self, group: LayerGroup, number: int) -> list[bytes]:
        return _numbers(number, block_parts(group, CODEC, number * BLOCK_TOKENS)[1:])

    def tail(self) -> list[bytes]:
        return _numbers(self._state.cached, tail_parts(self._state.groups, CODEC, self._state.cached))


def _numbers(seed: int, parts: Sequence[Part]) -> list[bytes]:
    numbers = np.random.default_rng(seed)
    return [numbers.bytes(part.nbytes) for part in parts]
