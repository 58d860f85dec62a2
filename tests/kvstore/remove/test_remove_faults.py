"""Removals and erasures are killed at every mutation, and run beside forks and writers."""

import multiprocessing
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from kvstore.errors import NotFoundError
from kvstore.lifecycle import fork
from kvstore.naming import Ref, parse_ref
from kvstore.remove.remove import remove
from kvstore.store import Store
from tests.support.making import ACTOR, commit, fast_folder, journal, picture, read_whole
from tests.support.running import children
from tests.support.running.children import LIMIT


def series(name: str) -> Iterator[Path]:
    """The stores that a killed removal leaves, one for each mutation it was killed at."""
    with fast_folder() as folder:
        children.run(sys.executable, "-m", "tests.support.faults.removals", name, folder, check=True)
        yield from sorted(folder.iterdir(), key=lambda path: int(path.name))


@pytest.mark.parametrize("name", ["rm", "erase", "erase-snapshot", "rm-domain"])
def test_killed_at_every_mutation(name: str) -> None:
    count = 0
    for root in series(name):
        count += 1
        store = Store.open(root, ACTOR)
        held = picture(root)
        assert held.get("b") == list(range(600)) or name == "rm-domain"
        for text, tokens in held.items():
            assert read_whole(store, store.resolve(parse_ref(text)).manifest) == tokens
        commit(store, "later", range(3))
        entries = journal(root)
        gone = [entry for entry in entries if entry.change.op in ("rm", "erase")]
        voided = {entry.seq - 1 for entry in entries if entry.change.op == "void"}
        ids = {agent.id for agent in store.agents()}
        assert all((entry.change.agent_id in ids) == (entry.seq in voided) for entry in gone)
    assert count > 5


ROUNDS = 12


def write_and_fork(root: Path, number: int) -> None:
    """Fork the agent `seed` and write on, again and again."""
    store = Store.open(root, ACTOR)
    for done in range(ROUNDS):
        name = f"w{number}-{done}"
        fork(store, Ref("seed"), name)
        # it may be erased in between: what is written then is a new agent
        commit(store, name, range(600 + number))


def erase_all_but_seed(store: Store) -> set[str]:
    """The names of the agents that were there."""
    erased = set()
    for agent in store.agents():
        if agent.name != "seed":
            with suppress(NotFoundError):
                remove(store, Ref(agent.name), wait=10, erase=True)
                erased.add(agent.name)
    return erased


def test_erasures_beside_forks_and_writers(store: Store) -> None:
    commit(store, "seed", range(600))
    spawned = multiprocessing.get_context("forkserver")
    erased: set[str] = set()
    with ProcessPoolExecutor(2, spawned) as pool:
        writers = [pool.submit(write_and_fork, store.layout.root, number) for number in range(2)]
        while not all(writer.done() for writer in writers):
            erased |= erase_all_but_seed(store)
        for writer in writers:
            writer.result(timeout=LIMIT)
    erased |= erase_all_but_seed(store)
    assert erased == {f"w{number}-{done}" for number in range(2) for done in range(ROUNDS)}
    held = picture(store.layout.root)
    assert held.pop("seed") == list(range(600))
    assert all(len(tokens) in (600, 601) for tokens in held.values())
    assert len(journal(store.layout.root)) > 10
