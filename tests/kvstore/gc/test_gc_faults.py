"""gc on a full disk, where files cannot be deleted, killed at every mutation, and beside writers."""

import errno
import multiprocessing
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from kvstore.disk import files
from kvstore.errors import AmemError, NoSpaceError
from kvstore.format.manifest import Manifest
from kvstore.gc.collect import GCResult, Policy
from kvstore.gc.collect import collect as collect_garbage
from kvstore.lifecycle import restore
from kvstore.naming import Ref, parse_ref
from kvstore.store import BALLAST, Store
from kvstore.verify.checks import Checks
from kvstore.verify.verify import verify
from tests.support.faults.scenarios import at_mutation
from tests.support.making import ACTOR, commit, fast_folder, journal, picture, read_whole
from tests.support.running.children import LIMIT

A, B, C = (list(range(start, start + 1200)) for start in (0, 5000, 9000))


def collect(store: Store, **policy: int) -> GCResult:
    return collect_garbage(store, Policy(**policy))


@pytest.fixture
def _no_fault_left() -> Iterator[None]:
    yield
    files.fault = None


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    if os.getuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder]).returncode:
        pytest.skip("needs the right to mount")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("policy", [Policy(keep_history=0), Policy(keep_history=0, max_bytes=0)])
def test_a_full_disk_can_be_cleaned(small_disk: Path, policy: Policy) -> None:
    store = Store.open_or_create(small_disk / "store", ACTOR)
    commit(store, "a", A[:600])
    commit(store, "a", B)
    with pytest.raises(OSError, match="No space"), (small_disk / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096)) or os.write(filler.fileno(), b"x")
    with pytest.raises(NoSpaceError):
        commit(store, "c", C)
    result = collect_garbage(store, policy)
    assert result.freed_bytes > 0
    assert result.evicted == (("a",) if policy.max_bytes == 0 else ())
    assert (result.failed, result.journaled) == ((), True)
    assert store.layout.ballast.stat().st_size == BALLAST
    assert journal(store.layout.root)[-1].change.op == "gc"
    assert store.tokens(store.resolve(parse_ref("a")).manifest).tolist() == B


@pytest.mark.usefixtures("_no_fault_left")
def test_every_write_may_fail(store: Store) -> None:
    commit(store, "a", A[:600])
    commit(store, "a", B)

    def full(step: str, path: Path) -> None:
        if step not in ("unlink", "remove", "sync", "flush", "open"):
            raise OSError(errno.ENOSPC, "full", str(path))

    files.fault = full
    result = collect(store, keep_history=0)
    assert (result.freed_bytes > 0, result.failed, result.journaled) == (True, (), False)
    assert picture(store.layout.root) == {"a": B}


@pytest.mark.usefixtures("_no_fault_left")
@pytest.mark.parametrize("kind", ["manifests", "pages", "tails", "blocks"])
def test_what_cannot_be_deleted_is_told(store: Store, kind: str) -> None:
    commit(store, "a", A[:600])
    commit(store, "a", B)

    def refuse(step: str, path: Path) -> None:
        if step == "unlink" and path.parent.parent.name == kind:
            raise OSError(errno.EACCES, "no", str(path))

    files.fault = refuse
    result = collect(store, keep_history=0)
    assert not result.complete
    assert {found.kind for found in result.failed} == {kind[:-1]}
    if kind == "manifests":  # an earlier state that can still be found is still whole
        assert read_whole(store, store.resolve(parse_ref("a~1")).manifest) == A[:600]
    files.fault = None
    assert collect(store, keep_history=0).complete
    assert picture(store.layout.root) == {"a": B}


@pytest.mark.long
def test_killed_at_any_mutation_it_leaves_whole_states() -> None:
    with fast_folder() as folder:
        base = Store.open_or_create(folder / "base", ACTOR)
        for tokens in (A[:300], B[:300]):
            commit(base, "a", tokens)
        number = 0
        while True:
            root = folder / str(number)
            shutil.copytree(base.layout.root, root)
            store = Store.open(root, ACTOR)
            if not killed(partial(collect_garbage, store, Policy(0, max_bytes=0)), number):
                break
            for state in every_state(store, "a"):
                assert store.tokens(state).size
                if state.cached:
                    read_whole(store, state)
            if number % 5 == 0:
                collect_garbage(store, Policy(0, max_bytes=0))
                assert list(store.layout.domains.glob("*/blocks/*/*")) == []
                assert verify(store, Checks()).findings == ()
            shutil.rmtree(root)
            number += 1
        assert number > 40


def every_state(store: Store, agent: str) -> list[Manifest]:
    """The states that agent~N names."""
    found: list[Manifest] = []
    with suppress(AmemError):
        while True:
            found.append(store.resolve(Ref(agent, back=len(found))).manifest)
    assert found
    return found


def killed(work: Callable[[], object], number: int) -> bool:
    child = os.fork()
    if not child:
        files.fault = at_mutation(number, lambda _: os.kill(os.getpid(), signal.SIGKILL))
        work()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert not os.WIFEXITED(status) or not os.WEXITSTATUS(status)
    return os.WIFSIGNALED(status)


# --- beside writers


def write(root: Path, number: int, until: float) -> int:
    """Turns of an agent that forget, remember and restore, so that what was garbage a moment ago is used again."""
    store = Store.open_or_create(root, ACTOR)
    rounds = 0
    while not rounds or time.time() < until:  # a busy machine may start this process late
        tokens = [number % 2, *range((rounds % 5 + 1) * 130)]
        name = f"w{number}"
        commit(store, name, tokens, store.create_domain("team"), wait=30)
        state = store.resolve(parse_ref(name)).manifest
        if state.cached:  # else gc has evicted it in between
            assert read_whole(store, state) == tokens
        if rounds % 3 == 2:
            restore(store, parse_ref(f"{name}~1"), wait=30)
        rounds += 1
    return rounds


def collect_all_the_time(root: Path, until: float) -> int:
    store, rounds = Store.open(root, ACTOR), 0
    while not rounds or time.time() < until:
        collect_garbage(store, Policy(1))
        rounds += 1
    return rounds


def writers_and_gc(root: Path, seconds: float) -> int:
    commit(Store.open_or_create(root, ACTOR), "a", A)
    until = time.time() + seconds
    with ProcessPoolExecutor(3, multiprocessing.get_context("forkserver")) as pool:
        writers = [pool.submit(write, root, number, until) for number in range(2)]
        collector = pool.submit(collect_all_the_time, root, until)
        written = [writer.result(timeout=seconds + LIMIT) for writer in writers]
        rounds = collector.result(timeout=LIMIT)
    held = picture(root)
    assert held["a"] == A
    assert set(held) == {"a", "w0", "w1"}
    collect_garbage(Store.open(root, ACTOR), Policy(0))
    assert picture(root) == held
    assert all(written)
    assert len(journal(root)) > sum(written)  # a line for each turn, and for the first one
    return rounds


@pytest.mark.long
def test_two_writers_and_gc_together() -> None:
    with fast_folder() as folder:
        assert writers_and_gc(folder / "store", 8) > 10


@pytest.mark.slow
def test_a_thousand_rounds_of_writers_and_gc() -> None:
    with fast_folder() as folder:
        rounds = 0
        for number in range(100):
            rounds += writers_and_gc(folder / str(number), 5)
            if rounds > 1000:
                return
        pytest.fail(f"only {rounds} rounds")
