"""Several processes on one store at once."""

import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

import pytest

from kvstore.errors import BusyError
from kvstore.store import Store
from tests.support.making import ACTOR, commit, journal, picture, put_state
from tests.support.running.children import LIMIT

WRITERS = 8


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(WRITERS, multiprocessing.get_context("forkserver")) as executor:
        yield executor


def together(pool: ProcessPoolExecutor, work: Callable[[Path, int, float], str], root: Path) -> list[str]:
    start = time.time() + 0.5
    futures: list[Future[str]] = [pool.submit(work, root, number, start) for number in range(WRITERS)]
    return [future.result(timeout=LIMIT) for future in futures]


def _sleep_until(start: float) -> None:
    time.sleep(max(0.0, start - time.time()))


def create(root: Path, _: int, start: float) -> str:
    _sleep_until(start)
    return Store.open_or_create(root, ACTOR).id


def prefill_the_same(root: Path, number: int, start: float) -> str:
    _sleep_until(start)
    store = Store.open_or_create(root, ACTOR)
    return commit(store, f"a{number}", range(600), store.create_domain("team"))


def add_tokens(root: Path, _: int, start: float) -> str:
    """Add a token to what one agent has, three times, each under one hold."""
    store = Store.open_or_create(root, ACTOR)
    _sleep_until(start)
    for _ in range(3):
        with store.hold("a", wait=30) as hold:
            assert hold.agent
            before = hold.agent.manifest
            head = store.manifest(hold.agent.domain, before)
            with store.transaction(store.domain(head.domain)) as txn:
                tokens = [*store.tokens(head).tolist(), 0]
                txn.commit(hold, put_state(txn, head.agent, before, tokens), before)
    return "done"


def hold_for_a_second(root: Path, _: int, start: float) -> str:
    _sleep_until(start)
    with Store.open(root, ACTOR).hold("a", wait=20):
        time.sleep(1)
    return "done"


def test_one_store_is_made(pool: ProcessPoolExecutor, tmp_path: Path) -> None:
    ids = together(pool, create, tmp_path / "store")
    assert set(ids) == {Store.open(tmp_path / "store", ACTOR).id}


def test_the_same_blocks_at_once(pool: ProcessPoolExecutor, tmp_path: Path) -> None:
    root = tmp_path / "store"
    together(pool, prefill_the_same, root)
    assert picture(root) == {f"a{n}": list(range(600)) for n in range(WRITERS)}
    assert len(list(root.glob("domains/*/blocks/*/*"))) == 3  # two full ones, and the one that the window still reaches
    assert len(list(root.glob("domains/*"))) == 1
    assert len(journal(root)) == WRITERS
    assert list((root / "staging").iterdir()) == []


def test_no_commit_is_lost(pool: ProcessPoolExecutor, store: Store) -> None:
    commit(store, "a", range(10))
    together(pool, add_tokens, store.layout.root)
    assert picture(store.layout.root) == {"a": [*range(10), *[0] * (3 * WRITERS)]}
    assert len(journal(store.layout.root)) == 1 + 3 * WRITERS


def test_one_waits_or_is_told_who_holds(pool: ProcessPoolExecutor, store: Store) -> None:
    commit(store, "a", range(10))
    future = pool.submit(hold_for_a_second, store.layout.root, 0, 0.0)
    deadline = time.monotonic() + LIMIT
    with pytest.raises(BusyError, match=r"agent a is held by process \d+ \(test\)"):
        while time.monotonic() < deadline:
            with store.hold("a", wait=0):
                pass
            time.sleep(0.02)  # a chance for the other one
    commit(store, "a", range(11), wait=20)
    assert future.result() == "done"
    assert picture(store.layout.root) == {"a": list(range(11))}
