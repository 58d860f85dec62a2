import hashlib
import os
from pathlib import Path

import pytest

from kvstore.commit.index import Index
from kvstore.commit.staging import RUNNING
from kvstore.disk import files
from kvstore.errors import BusyError, DamageError, NotFoundError, UsageError
from kvstore.format.kinds import BLOCK, MANIFEST
from kvstore.history.log import journal_head
from kvstore.lifecycle import restore, snapshot
from kvstore.naming import Ref, parse_ref
from kvstore.remove.certificate import check_erased, is_erased
from kvstore.remove.remove import Removal, remove, remove_domain
from kvstore.store import Store
from tests.support.making import commit, journal, picture


def stored(store: Store) -> set[Path]:
    """All files of all domains."""
    return {path for path in store.layout.domains.rglob("*") if path.is_file()}


def actions(removal: Removal) -> dict[str, set[str]]:
    by_action: dict[str, set[str]] = {}
    for found in removal.objects:
        by_action.setdefault(found.action, set()).add(found.kind)
    return by_action


def names(store: Store) -> list[str]:
    return [agent.name for agent in store.agents()]


def test_rm_ends_an_agent_and_leaves_its_bytes(forked: Store) -> None:
    before = stored(forked)
    done = remove(forked, Ref("a"), wait=0)
    assert names(forked) == ["b"]
    assert stored(forked) == before
    assert not forked.layout.snapshot_folder("a").exists()
    assert (done.complete, done.certificate) == (False, None)
    assert actions(done)["removed"] == {"agent", "snapshot"}
    assert {found.held_by for found in done.objects if found.action == "kept"} == {("b",)}
    assert done.bytes_of("left") > 0
    assert picture(forked.layout.root) == {"b": list(range(600))}
    last = journal(forked.layout.root)[-1].change
    assert (last.op, last.after) == ("rm", None)


def test_a_name_used_again_never_reaches_the_older_agent(forked: Store) -> None:
    old = forked.agent("a")
    remove(forked, Ref("a"), wait=0)
    commit(forked, "a", range(300))
    new = forked.agent("a")
    assert new.id != old.id and new.domain != old.domain
    assert forked.snapshots("a") == []
    with pytest.raises(NotFoundError):
        forked.resolve(Ref("a", digest=old.manifest))


def test_rm_of_a_snapshot(forked: Store) -> None:
    done = remove(forked, parse_ref("a@s"), wait=0)
    assert forked.snapshots("a") == []
    assert actions(done).keys() == {"removed", "kept"}  # the head's history holds all of it
    assert len(picture(forked.layout.root)) == 2
    with pytest.raises(NotFoundError):
        remove(forked, parse_ref("a@s"), wait=0)


@pytest.mark.parametrize("ref", ["a~1", "a@sha256:" + "0" * 8])
def test_an_earlier_state_cannot_be_removed(forked: Store, ref: str) -> None:
    with pytest.raises(UsageError, match="neither an agent nor a snapshot"):
        remove(forked, parse_ref(ref), wait=0)


def test_rm_waits_for_the_agent(forked: Store) -> None:
    with forked.hold("a", 0):
        for ref in ("a", "a@s"):
            with pytest.raises(BusyError):
                remove(forked, parse_ref(ref), wait=0)
        assert remove(forked, Ref("a"), wait=0, dry_run=True).dry_run
    assert names(forked) == ["a", "b"]


def test_a_domain_goes_with_all_its_agents_and_frees_its_name(store: Store) -> None:
    home = store.create_domain("team")
    for name in "ab":
        commit(store, name, range(600), home)
    commit(store, "c", range(300))
    remove_domain(store, "team", wait=0)
    assert names(store) == ["c"]
    with pytest.raises(NotFoundError):
        store.domain_named("team")
    assert store.create_domain("team").id != home.id
    assert [entry.change.op for entry in journal(store.layout.root)[-3:]] == ["rm", "rm", "rm-domain"]


def test_a_domain_in_use_is_not_removed(store: Store) -> None:
    home = store.create_domain("team")
    commit(store, "a", range(300), home)
    with store.transaction(home), pytest.raises(BusyError, match="domain team"):
        remove_domain(store, "team", wait=0, erase=True)
    assert names(store) == ["a"]


def test_an_erasure_leaves_nothing(store: Store) -> None:
    commit(store, "a", range(600), complete=False)  # which the next state takes the place of
    commit(store, "a", range(1000))
    snapshot(store, Ref("a"), "s")
    restore(store, parse_ref("a@s"), wait=0)
    commit(store, "b", range(300))
    home, other = store.agent("a"), stored(store)
    done = remove(store, Ref("a"), wait=0, erase=True)
    assert done.complete
    assert not store.layout.domain(home.domain).exists()
    assert stored(store) == {path for path in other if home.domain not in path.parts}
    assert Index(store.layout).listed(home.domain) == set()
    assert home.domain.encode() not in store.layout.index.read_bytes()  # overwritten, not only unlinked
    assert done.bytes_of("erased") > 0
    certificate = done.certificate
    assert certificate
    assert (certificate.agents, certificate.domain_erased, certificate.remaining) == ((home.id,), True, ())
    assert certificate.journal_head == journal_head(store.layout.journal).digest
    assert check_erased(store, certificate) == []
    assert is_erased(store.layout, home.id, "")
    assert is_erased(store.layout, "", home.domain)
    assert not is_erased(store.layout, store.agent("b").id, store.agent("b").domain)
    assert picture(store.layout.root) == {"b": list(range(300))}


def test_forks_keep_what_they_need(forked: Store) -> None:
    source, before = forked.agent("a"), stored(forked)
    planned = remove(forked, Ref("a"), wait=0, erase=True, dry_run=True)
    assert stored(forked) == before
    assert names(forked) == ["a", "b"]
    done = remove(forked, Ref("a"), wait=0, erase=True)
    assert done.objects == planned.objects
    assert not done.complete
    kept = {found.name: found for found in done.objects if found.action == "kept"}
    assert {found.held_by for found in kept.values()} == {("b",)}
    assert all(found.bytes and found.reason for found in kept.values())
    left = {path.stem for path in stored(forked)} - {"domain"}
    assert kept.keys() < left  # and the fork's own manifest
    assert picture(forked.layout.root) == {"b": list(range(600))}
    assert done.certificate and not done.certificate.domain_erased
    assert check_erased(forked, done.certificate) == []
    rows = Index(forked.layout).listed(source.domain)
    assert rows == {path.stem for path in stored(forked) if "blocks" in path.parts}
    # the fork is the last that holds it
    last = remove(forked, Ref("b"), wait=0, erase=True)
    assert last.complete
    assert stored(forked) == set()


def test_an_erased_snapshot_takes_what_only_it_held(store: Store) -> None:
    commit(store, "a", range(300))
    snapshot(store, Ref("a"), "s")
    first = store.agent("a")
    commit(store, "a", range(600))
    kept = remove(store, parse_ref("a@s"), wait=0, erase=True, dry_run=True)
    assert {found.held_by for found in kept.objects if found.action == "kept"} == {("a",)}  # by a's history
    head = store.agent("a").manifest
    path = store.layout.object(first.domain, MANIFEST, head)  # a head without that history, as after a gc
    text = path.read_text().replace(f'"previous":"{first.manifest}"', '"previous":null')
    digest = hashlib.sha256(text.encode()).hexdigest()
    cut = store.layout.object(first.domain, MANIFEST, digest)
    cut.parent.mkdir(exist_ok=True)
    cut.write_text(text)
    ref = store.layout.agent_ref("a")
    ref.write_text(ref.read_text().replace(head, digest))
    done = remove(store, parse_ref("a@s"), wait=0, erase=True)
    erased = {found.name for found in done.objects if found.action == "erased"}
    assert {first.manifest, head} <= erased
    assert store.layout.domain(first.domain).exists()
    assert picture(store.layout.root) == {"a": list(range(600))}
    assert done.certificate and done.certificate.snapshots
    assert check_erased(store, done.certificate) == []


def test_what_a_running_command_uses_stays(forked: Store) -> None:
    state = forked.resolve(Ref("a"))
    only = next(row for row in forked.blocks(state.manifest) if row.position == 768)
    with forked.transaction(forked.domain(state.agent.domain)) as txn:
        txn.pin([only])
        done = remove(forked, Ref("a"), wait=0, erase=True)
    [held] = [found for found in done.objects if found.held_by == (RUNNING,)]
    assert (held.kind, held.name, held.action) == ("block", only.sha256, "kept")
    assert forked.layout.object(state.agent.domain, BLOCK, only.sha256).exists()


def test_nothing_goes_when_it_is_unknown_what_others_need(forked: Store) -> None:
    other = forked.agent("b")
    forked.layout.object(other.domain, MANIFEST, other.manifest).write_bytes(b"{}")
    before = stored(forked)
    with pytest.raises(DamageError, match="agent b"):
        remove(forked, Ref("a"), wait=0, erase=True)
    assert (stored(forked), names(forked)) == (before, ["a", "b"])
    remove(forked, Ref("b"), wait=0, erase=True)  # the damaged one itself can be erased
    remove(forked, Ref("a"), wait=0, erase=True)
    assert stored(forked) == set()


@pytest.mark.parametrize("name", ["a", "alone"])
def test_a_failure_to_unlink_is_told_and_the_rest_goes_on(forked: Store, name: str) -> None:
    commit(forked, "alone", range(1300))
    state = forked.resolve(Ref(name))
    only = next(row for row in forked.blocks(state.manifest) if row.position == 768)
    stuck = forked.layout.object(state.agent.domain, BLOCK, only.sha256)

    def fault(step: str, path: Path) -> None:
        if (step, path) == ("unlink", stuck):
            raise OSError(5, os.strerror(5))

    files.fault = fault
    try:
        done = remove(forked, Ref(name), wait=0, erase=True)
    finally:
        files.fault = None
    failed = next(found for found in done.objects if found.action == "failed")
    assert (failed.kind, failed.name) == ("block", only.sha256)
    assert failed.reason and str(stuck) in failed.reason
    assert not done.complete
    assert done.certificate and f"block sha256:{only.sha256}" in done.certificate.remaining
    assert done.bytes_of("erased") > 0
    rest = remove_domain(forked, state.agent.domain, wait=0, erase=True)  # by its id: it has no name
    assert rest.complete and not forked.layout.domain(state.agent.domain).exists()
