"""gc deletes exactly what is unreachable, and evicts on request."""

from pathlib import Path

import pytest

from kvstore.commit import refs
from kvstore.commit.index import Index
from kvstore.commit.journal import Change
from kvstore.errors import AmemError, DamageError
from kvstore.format.kinds import BLOCK, PAGE
from kvstore.lifecycle import fork, snapshot
from kvstore.naming import parse_ref
from kvstore.remove.remove import remove
from kvstore.store import Store
from kvstore.verify.checks import Checks
from kvstore.verify.verify import verify
from tests.support.collecting import collect, objects
from tests.support.making import ACTOR, WINDOW, commit, journal, picture, read_whole

A, B, C = (list(range(start, start + 1200)) for start in (0, 5000, 9000))


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


def test_what_a_window_has_left_behind_goes(store: Store) -> None:
    assert WINDOW.window == 300
    for end in (300, 600, 1200):
        commit(store, "a", A[:end])
    domain = store.layout.domain(store.agent("a").domain)
    before = len(list(domain.glob("blocks/*/*")))
    collect(store, keep_history=0)
    assert before - len(list(domain.glob("blocks/*/*"))) == 2  # of tokens 0 to 511: the window begins at 899
