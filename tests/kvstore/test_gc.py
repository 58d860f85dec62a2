"""gc takes exactly what nobody leads to, evicts on request, works on a full disk and beside writers."""

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

from kvstore import files, refs
from kvstore.errors import AmemError, DamageError, NoSpaceError
from kvstore.evict import evict
from kvstore.gc import GCResult, Policy, gc
from kvstore.index import Index
from kvstore.journal import Change
from kvstore.lifecycle import fork, restore, snapshot
from kvstore.manifest import Manifest
from kvstore.marks import read_root
from kvstore.naming import Ref, parse_ref
from kvstore.removal import remove
from kvstore.store import BALLAST, Store
from kvstore.verify import Checks, verify
from tests.kvstore.making import ACTOR, WINDOW, commit, fast_folder, journal, picture, read_whole
from tests.kvstore.scenarios import at_mutation

A, B, C = (list(range(start, start + 1200)) for start in (0, 5000, 9000))


def objects(store: Store) -> dict[Path, int]:
    """Every file of every domain, and its bytes."""
    return {path: path.lstat().st_size for path in store.layout.domains.rglob("*") if not path.is_dir()}


def collect(store: Store, dry_run: bool = False, **policy: float) -> GCResult:
    return gc(store, Policy(**policy), dry_run)  # type: ignore[arg-type]


def test_a_healthy_store_has_nothing_to_collect(store: Store) -> None:
    commit(store, "a", A[:300])
    commit(store, "a", A)
    before = objects(store)
    result = collect(store)
    assert (result.freed_bytes, result.handled, result.complete) == (0, (), True)
    assert objects(store) == before
    assert result.kept_bytes == sum(before.values()) - store.layout.domain_file(store.agent("a").domain).stat().st_size
    assert len(journal(store.layout.root)) == 2  # nothing went, so there is nothing to tell


def test_it_frees_exactly_what_no_ref_leads_to(store: Store) -> None:
    for end in range(300, 1300, 100):
        commit(store, "a", A[:end])
    commit(store, "b", B)
    fork(store, parse_ref("b"), "c")
    snapshot(store, parse_ref("a~5"), "s")
    remove(store, parse_ref("b"), wait=0)
    expected = picture(store.layout.root)
    planned = collect(store, dry_run=True, keep_history=2)
    before = objects(store)
    result = collect(store, keep_history=2)
    after = objects(store)
    assert result.freed_bytes == sum(before.values()) - sum(after.values()) > 0
    assert result.freed_objects == len(before) - len(after)
    assert (planned.freed_bytes, planned.freed_objects) == (result.freed_bytes, result.freed_objects)
    assert set(planned.handled) == set(result.handled)
    assert picture(store.layout.root) == expected
    for ref in ("a", "a~1", "a~2", "a@s"):
        assert read_whole(store, store.resolve(parse_ref(ref)).manifest)
    assert store.resolve(parse_ref("c")).manifest.resumes  # what a fork took over stays, though its agent has gone
    assert read_whole(
        store, store.manifest(store.agent("c").domain, store.resolve(parse_ref("c")).manifest.resumes or "")
    )
    with pytest.raises(AmemError, match="earlier states"):
        store.resolve(parse_ref("a~3"))
    assert collect(store, keep_history=2).freed_objects == 0


def test_a_dry_run_names_agents_and_writes_nothing(store: Store, steps: list[str]) -> None:
    commit(store, "a", A[:600])
    commit(store, "a", A[600:])
    del steps[:]
    result = collect(store, dry_run=True, keep_history=0)
    assert steps == []
    assert {found.action for found in result.handled} == {"delete"}
    assert {(found.reason, found.agents) for found in result.handled} == {("history", ("a",))}
    assert {found.kind for found in result.handled} == {"manifest", "page", "tail", "block"}


def test_what_a_removed_agent_had_goes_with_its_domain(store: Store) -> None:
    commit(store, "a", A)
    store.create_domain("team")
    remove(store, parse_ref("a"), wait=0)
    result = collect(store)
    assert {found.reason for found in result.handled} == {"removed", "empty"}
    assert list(store.layout.domains.iterdir()) == []
    assert result.freed_bytes > 0


def test_dead_writers_and_cut_off_commits_go(store: Store) -> None:
    commit(store, "a", A)
    with store.transaction(store.domain(store.agent("a").domain)) as live:
        dead = store.layout.staging / "dead"
        dead.mkdir()
        (dead / "pins").write_bytes(b"x\n")
        orphan = store.layout.page(store.agent("a").domain, "ab" + "0" * 62)
        orphan.parent.mkdir(exist_ok=True)
        orphan.write_bytes(b"{}")
        result = collect(store)
        assert {(f.kind, f.reason, f.bytes) for f in result.handled} == {
            ("page", "unnamed", 2),
            ("staging", "dead-writer", 2),
        }
        assert live.domain.id == store.agent("a").domain
    assert not dead.exists()
    assert not orphan.parent.exists()


def test_pins_of_a_live_transaction_hold(store: Store) -> None:
    commit(store, "a", A[:600])
    head = store.resolve(parse_ref("a")).manifest
    rows = store.blocks(head)
    commit(store, "a", A[600:])
    with store.transaction(store.domain(head.domain)) as transaction:
        transaction.pin(rows)
        result = collect(store, keep_history=0)
        assert all(store.layout.block(head.domain, row.sha256).exists() for row in rows)
        kept = [found for found in result.handled if found.action == "keep"]
        assert {found.name for found in kept} == {row.sha256 for row in rows}
    assert collect(store, keep_history=0).freed_objects == len(rows)


def test_snapshots_that_a_cut_off_removal_has_left_go(store: Store) -> None:
    for name, tokens in (("a", A), ("b", B)):
        commit(store, name, tokens)
        snapshot(store, parse_ref(name), "s")
    with refs.moving(store.layout, ACTOR) as lines:  # what `rm` does, until it is killed
        agent = store.agent("a")
        lines.append(Change(refs.REMOVE, agent.id, agent.domain, agent.manifest, None))
        store.layout.agent_ref("a").unlink()
    commit(store, "a", C)
    assert verify(store, Checks()).findings == ()
    planned = collect(store, dry_run=True)
    result = collect(store)
    assert set(planned.handled) == set(result.handled)
    assert ("snapshot", "removed", "s") in {(found.kind, found.reason, found.name) for found in result.handled}
    assert not store.layout.snapshot_folder("a").exists()
    assert not store.layout.domain(agent.domain).exists()
    assert picture(store.layout.root) == {"a": C, "b": B, "b@s": B}


def test_rows_of_removed_blocks_go(store: Store) -> None:
    commit(store, "a", A[:600])
    commit(store, "a", A[600:])
    domain = store.agent("a").domain
    collect(store, keep_history=0)
    assert Index(store.layout).listed(domain) == {path.stem for path in store.layout.root.glob("domains/*/blocks/*/*")}


def test_it_needs_no_index(store: Store) -> None:
    commit(store, "a", A[:600])
    commit(store, "a", A[600:])
    store.layout.index.unlink()
    assert collect(store, keep_history=0).freed_objects
    assert not store.layout.index.exists()


@pytest.mark.parametrize("kind", ["manifests", "pages", "tails", "blocks"])
def test_with_anything_missing_it_deletes_nothing(store: Store, kind: str) -> None:
    for tokens in (A[:300], A[:600], B):
        commit(store, "a", tokens)
    commit(store, "b", C)
    domain = store.agent("b").domain
    next(store.layout.domain(domain).glob(f"{kind}/*/*")).unlink()
    before = objects(store)
    for dry_run in (True, False):
        with pytest.raises(
            DamageError, match=rf"{kind[:-1]} sha256:.* is missing; b needs it, and nothing was deleted"
        ):
            collect(store, dry_run, keep_history=0)
    assert objects(store) == before


def test_a_damaged_ref_stops_it(store: Store) -> None:
    commit(store, "a", A[:300])
    commit(store, "a", B)
    path = store.layout.agent_ref("a")
    path.write_bytes(path.read_bytes()[:-9])
    before = objects(store)
    with pytest.raises(DamageError, match="altered or cut short"):
        collect(store, keep_history=0)
    assert objects(store) == before


def test_strangers_are_told_and_stay(store: Store, tmp_path: Path) -> None:
    commit(store, "a", A)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / ("0" * 64 + ".safetensors")).write_bytes(b"mine")
    domain = store.layout.domain(store.agent("a").domain)
    (domain / "notes.txt").write_text("mine")
    (domain / "blocks" / "00").symlink_to(outside)
    (store.layout.root / "readme").write_text("mine")
    result = collect(store, keep_history=0)
    foreign = {found.name for found in result.handled if found.reason == "foreign"}
    assert foreign == {"readme", f"domains/{domain.name}/notes.txt", f"domains/{domain.name}/blocks/00"}
    assert (outside / ("0" * 64 + ".safetensors")).read_bytes() == b"mine"
    assert (domain / "notes.txt").exists()


# --- evictions


def test_the_least_recently_used_agent_is_evicted(store: Store) -> None:
    for name, tokens in (("a", A), ("b", B), ("c", C)):
        commit(store, name, tokens)
    limit = collect(store).kept_bytes - 1
    planned = collect(store, dry_run=True, max_bytes=limit)
    result = collect(Store.open(store.layout.root, ACTOR), max_bytes=limit)
    assert planned.evicted == result.evicted == ("a",)
    assert planned.freed_bytes == result.freed_bytes
    assert result.kept_bytes <= limit
    assert result.complete
    head = store.resolve(parse_ref("a")).manifest
    assert (head.op, head.cached, head.tail, head.window_blocks, head.tokens) == ("evict", 0, None, (), len(A))
    assert (head.feeds, head.complete) == (((len(A) - 1, 1),), True)
    assert store.tokens(head).tolist() == A
    assert store.blocks(head) == []
    assert list(store.layout.domain(head.domain).glob("blocks/*/*")) == []
    assert collect(store, max_bytes=limit).evicted == ()
    commit(store, "a", [*A, 1])
    assert picture(store.layout.root)["a"] == [*A, 1]


def test_using_an_agent_spares_it(store: Store) -> None:
    for name, tokens in (("a", A), ("b", B), ("a", [*A, 1])):
        commit(store, name, tokens)
    assert collect(store, max_bytes=collect(store).kept_bytes - 1).evicted == ("b",)


def test_a_held_agent_is_never_evicted(store: Store) -> None:
    commit(store, "a", A)
    commit(store, "b", B)
    limit = collect(store).kept_bytes - 1
    with store.hold("a", wait=0):
        assert collect(store, max_bytes=limit).evicted == ("b",)
    assert store.resolve(parse_ref("a")).manifest.op == "prefill"


def test_snapshots_and_forks_keep_what_they_need(store: Store) -> None:
    commit(store, "a", A)
    snapshot(store, parse_ref("a"), "s")
    fork(store, parse_ref("a"), "b")
    result = collect(store, max_bytes=0)
    assert (result.evicted, result.complete) == ((), False)  # every byte of them is the snapshot's
    assert result.over_limit == result.kept_bytes > 0
    commit(store, "b", [*A, *B])
    result = collect(store, max_bytes=0)
    [told] = [found for found in result.handled if found.action == "evict"]
    assert (told.name, told.held_by) == ("b", ("a@s",))
    assert read_whole(store, store.resolve(parse_ref("a@s")).manifest) == A
    assert store.tokens(store.resolve(parse_ref("b")).manifest).tolist() == [*A, *B]


def test_forks_that_share_all_are_evicted_together(store: Store) -> None:
    commit(store, "a", A)
    fork(store, parse_ref("a"), "b")
    result = collect(store, max_bytes=0)
    assert set(result.evicted) == {"a", "b"}
    assert list(store.layout.domains.glob("*/blocks/*/*")) == []


def test_agents_unused_for_long_are_evicted(store: Store) -> None:
    commit(store, "a", A)
    assert collect(store, older_than=3600).evicted == ()
    assert collect(store, dry_run=True, older_than=0).evicted == ("a",)
    assert collect(store, older_than=0).evicted == ("a",)


def test_an_incomplete_prefill_stays_incomplete(store: Store) -> None:
    commit(store, "a", A[:300])
    first = store.agent("a").manifest
    commit(store, "a", A, complete=False)
    assert collect(store, older_than=0).evicted == ("a",)
    head = store.resolve(parse_ref("a")).manifest
    assert (head.complete, head.op) == (False, "evict")
    assert head.previous == first  # the state that was cut short takes no part in history


def test_a_head_that_moved_is_not_evicted(store: Store) -> None:
    commit(store, "a", A)
    root = read_root(store.layout, store.layout.agent_ref("a"))
    assert root
    commit(store, "a", B)
    assert not evict(store, root)
    assert picture(store.layout.root) == {"a": B}


# --- a full disk, failures, crashes


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
    result = gc(store, policy)
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


def test_killed_at_any_mutation_it_leaves_whole_states() -> None:
    with fast_folder() as folder:
        base = Store.open_or_create(folder / "base", ACTOR)
        for name, tokens in (("a", A[:300]), ("a", A[:600]), ("a", B[:300]), ("b", C[:300])):
            commit(base, name, tokens)
        number = 0
        while True:
            root = folder / str(number)
            shutil.copytree(base.layout.root, root)
            store = Store.open(root, ACTOR)
            if not killed(partial(gc, store, Policy(0, max_bytes=0)), number):
                break
            for state in [*every_state(store, "a"), *every_state(store, "b")]:
                assert store.tokens(state).size
                if state.cached:
                    read_whole(store, state)
            if number % 5 == 0:
                gc(store, Policy(0, max_bytes=0))
                assert list(store.layout.domains.glob("*/blocks/*/*")) == []
                assert verify(store, Checks()).findings == ()
            shutil.rmtree(root)
            number += 1
        assert number > 40


def every_state(store: Store, agent: str) -> list[Manifest]:
    """The states that ~N leads to."""
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
    while time.time() < until:
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
    while time.time() < until:
        gc(store, Policy(1))
        rounds += 1
    return rounds


def writers_and_gc(root: Path, seconds: float) -> int:
    commit(Store.open_or_create(root, ACTOR), "a", A)
    until = time.time() + seconds
    with ProcessPoolExecutor(3, multiprocessing.get_context("forkserver")) as pool:
        writers = [pool.submit(write, root, number, until) for number in range(2)]
        collector = pool.submit(collect_all_the_time, root, until)
        assert all(writer.result(timeout=seconds + 60) for writer in writers)
        rounds = collector.result(timeout=60)
    held = picture(root)
    assert held["a"] == A
    assert set(held) == {"a", "w0", "w1"}
    gc(Store.open(root, ACTOR), Policy(0))
    assert picture(root) == held
    assert len(journal(root)) > rounds
    return rounds


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


def test_what_a_window_has_left_behind_goes(store: Store) -> None:
    assert WINDOW.window == 300
    for end in (300, 600, 1200):
        commit(store, "a", A[:end])
    domain = store.layout.domain(store.agent("a").domain)
    before = len(list(domain.glob("blocks/*/*")))
    collect(store, keep_history=0)
    assert before - len(list(domain.glob("blocks/*/*"))) == 2  # of tokens 0 to 511: the window begins at 899
