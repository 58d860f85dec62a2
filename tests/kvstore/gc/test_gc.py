"""gc takes exactly what nobody leads to, and evicts on request."""

from pathlib import Path

import pytest

from kvstore.commit import refs
from kvstore.commit.index import Index
from kvstore.commit.journal import Change
from kvstore.errors import AmemError, DamageError
from kvstore.format.kinds import BLOCK, PAGE
from kvstore.gc.collect import GCResult, Policy
from kvstore.gc.collect import collect as collect_garbage
from kvstore.gc.evict import evict
from kvstore.graph.roots import read_root
from kvstore.lifecycle import fork, snapshot
from kvstore.naming import parse_ref
from kvstore.remove.remove import remove
from kvstore.store import Store
from kvstore.verify.checks import Checks
from kvstore.verify.verify import verify
from tests.support.making import ACTOR, WINDOW, commit, journal, picture, read_whole

A, B, C = (list(range(start, start + 1200)) for start in (0, 5000, 9000))


def objects(store: Store) -> dict[Path, int]:
    """Every file of every domain, and its bytes."""
    return {path: path.lstat().st_size for path in store.layout.domains.rglob("*") if not path.is_dir()}


def collect(store: Store, dry_run: bool = False, **policy: float) -> GCResult:
    return collect_garbage(store, Policy(**policy), dry_run)  # type: ignore[arg-type]


def test_a_healthy_store_has_nothing_to_collect(store: Store) -> None:
    commit(store, "a", A[:300])
    commit(store, "a", A)
    before = objects(store)
    result = collect(store)
    assert (result.freed_bytes, result.collected, result.complete) == (0, (), True)
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
    assert set(planned.collected) == set(result.collected)
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
    assert {found.action for found in result.collected} == {"deleted"}
    assert {(found.reason, found.agents) for found in result.collected} == {("history", ("a",))}
    assert {found.kind for found in result.collected} == {"manifest", "page", "tail", "block"}


def test_what_a_removed_agent_had_goes_with_its_domain(store: Store) -> None:
    commit(store, "a", A)
    store.create_domain("team")
    remove(store, parse_ref("a"), wait=0)
    result = collect(store)
    assert {found.reason for found in result.collected} == {"removed", "empty"}
    assert list(store.layout.domains.iterdir()) == []
    assert result.freed_bytes > 0


def test_dead_writers_and_cut_off_commits_go(store: Store) -> None:
    commit(store, "a", A)
    with store.transaction(store.domain(store.agent("a").domain)) as live:
        dead = store.layout.staging / "dead"
        dead.mkdir()
        (dead / "pins").write_bytes(b"x\n")
        orphan = store.layout.object(store.agent("a").domain, PAGE, "ab" + "0" * 62)
        orphan.parent.mkdir(exist_ok=True)
        orphan.write_bytes(b"{}")
        result = collect(store)
        assert {(f.kind, f.reason, f.bytes) for f in result.collected} == {
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
        assert all(store.layout.object(head.domain, BLOCK, row.sha256).exists() for row in rows)
        kept = [found for found in result.collected if found.action == "kept"]
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
    assert set(planned.collected) == set(result.collected)
    assert ("snapshot", "removed", "s") in {(found.kind, found.reason, found.name) for found in result.collected}
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
    link = next(path for n in range(256) if not (path := domain / "blocks" / f"{n:02x}").exists())
    link.symlink_to(outside)
    (store.layout.root / "readme").write_text("mine")
    result = collect(store, keep_history=0)
    foreign = {found.name for found in result.collected if found.reason == "foreign"}
    assert foreign == {"readme", f"domains/{domain.name}/notes.txt", f"domains/{domain.name}/blocks/{link.name}"}
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
    [told] = [found for found in result.collected if found.action == "evicted"]
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


def test_what_a_window_has_left_behind_goes(store: Store) -> None:
    assert WINDOW.window == 300
    for end in (300, 600, 1200):
        commit(store, "a", A[:end])
    domain = store.layout.domain(store.agent("a").domain)
    before = len(list(domain.glob("blocks/*/*")))
    collect(store, keep_history=0)
    assert before - len(list(domain.glob("blocks/*/*"))) == 2  # of tokens 0 to 511: the window begins at 899
