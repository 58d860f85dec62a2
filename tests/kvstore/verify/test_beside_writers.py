"""verify finds nothing wrong beside four writers and gc."""

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from kvstore.gc.collect import Policy
from kvstore.gc.collect import collect as collect_garbage
from kvstore.lifecycle import fork, snapshot
from kvstore.naming import parse_ref
from kvstore.remove.remove import remove
from kvstore.store import Store
from kvstore.verify.checks import Report
from kvstore.verify.verify import verify
from tests.support.damaging import DEEP, QUICK, A, found
from tests.support.making import ACTOR, commit, fast_folder
from tests.support.running.children import LIMIT


def write(root: Path, number: int, until: float) -> int:
    store = Store.open_or_create(root, ACTOR)
    rounds = 0
    while not rounds or time.time() < until:  # a busy machine may start this process late
        name = f"w{number}"
        commit(store, name, [number, *range((rounds % 4 + 1) * 150)], wait=30)
        if rounds % 3 == 0:
            snapshot(store, parse_ref(name), f"s{rounds}")
        if rounds % 5 == 4:
            fork(store, parse_ref(name), f"{name}-{rounds}")
            remove(store, parse_ref(f"{name}-{rounds}"), wait=30, erase=rounds % 2 == 0)
        rounds += 1
    return rounds


def collect(root: Path, until: float) -> int:
    while time.time() < until:
        collect_garbage(Store.open(root, ACTOR), Policy(1))
        time.sleep(0.05)
    return 1


@pytest.mark.long
def test_nothing_is_found_beside_four_writers_and_gc() -> None:
    with fast_folder() as folder:
        store = Store.open_or_create(folder / "store", ACTOR)
        commit(store, "a", A)
        until = time.time() + 8
        reports: list[Report] = []
        with ProcessPoolExecutor(5, multiprocessing.get_context("forkserver")) as pool:
            running = [pool.submit(write, store.layout.root, number, until) for number in range(4)]
            running.append(pool.submit(collect, store.layout.root, until))
            while len(reports) <= 5 or time.time() < until:
                reports += [verify(store, checks) for checks in (QUICK, DEEP)]
            assert all(one.result(timeout=LIMIT) for one in running)
        assert [report.findings for report in reports if report.findings] == []
        assert found(store) == []
