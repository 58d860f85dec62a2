import pytest

from kvstore.errors import BusyError, ConflictError, NotFoundError, UsageError
from kvstore.format.kinds import MANIFEST
from kvstore.lifecycle import fork, restore, snapshot
from kvstore.naming import Ref, parse_ref
from kvstore.store import Store
from tests.support.making import commit, journal, picture, read_whole


def resolve(store: Store, text: str) -> str:
    return store.resolve(parse_ref(text)).digest


def test_earlier_states(store: Store) -> None:
    digests = [commit(store, "a", range(300 + n)) for n in range(4)]
    assert [resolve(store, f"a~{n}") for n in range(4)] == digests[::-1]
    for digest in digests:
        assert resolve(store, f"a@sha256:{digest}") == resolve(store, f"a@sha256:{digest[:12]}") == digest
    with pytest.raises(NotFoundError, match="3 earlier states"):
        resolve(store, "a~4")
    with pytest.raises(NotFoundError, match="no state sha256"):
        resolve(store, "a@sha256:" + "0" * 64)
    with pytest.raises(NotFoundError):
        resolve(store, "b")


def test_an_ambiguous_prefix_is_refused(store: Store) -> None:
    commit(store, "a", range(3))
    agent = store.agent("a")
    path = store.layout.object(agent.domain, MANIFEST, agent.manifest)
    fifth = "1" if agent.manifest[4] == "0" else "0"
    twin = agent.manifest[:4] + fifth * 60  # a state of the same prefix, which a snapshot names
    store.layout.object(agent.domain, MANIFEST, twin).write_bytes(path.read_bytes())
    snapshot(store, Ref("a"), "s")
    ref = store.layout.snapshot_ref("a", "s")
    ref.write_text(ref.read_text().replace(agent.manifest, twin))
    with pytest.raises(UsageError, match="2 states"):
        resolve(store, f"a@sha256:{agent.manifest[:4]}")
    assert resolve(store, f"a@sha256:{agent.manifest[:5]}") == agent.manifest


def test_history_ends_where_gc_has_cut_it(store: Store) -> None:
    digests = [commit(store, "a", range(300 + n)) for n in range(3)]
    store.layout.object(store.agent("a").domain, MANIFEST, digests[0]).unlink()
    assert resolve(store, "a~1") == digests[1]
    with pytest.raises(NotFoundError, match="1 earlier states"):
        resolve(store, "a~2")
    with pytest.raises(NotFoundError):
        resolve(store, f"a@sha256:{digests[0]}")


def test_snapshots(store: Store) -> None:
    first = commit(store, "a", range(300))
    made, new = snapshot(store, Ref("a"), "before", note="a note")
    assert (made.manifest, made.note, new) == (first, "a note", True)
    assert snapshot(store, Ref("a"), "before") == (made, False)
    commit(store, "a", range(400))
    assert snapshot(store, parse_ref("a~1"), "before") == (made, False)
    for name in ("before", "Before"):
        with pytest.raises(ConflictError, match="another state"):
            snapshot(store, Ref("a"), name)
    assert [snapshot(store, Ref("a"))[0].name for _ in range(2)] == ["s1", "s2"]
    assert [s.name for s in store.snapshots("a")] == ["before", "s1", "s2"]
    assert resolve(store, "a@before") == first
    with pytest.raises(NotFoundError) as caught:
        resolve(store, "a@befor")
    assert caught.value.hint == "did you mean before?"
    with pytest.raises(UsageError):
        snapshot(store, Ref("a"), "../x")


def test_a_snapshot_is_in_the_journal(store: Store) -> None:
    digest = commit(store, "a", range(3))
    made, _ = snapshot(store, Ref("a"), "secret-name", "why")
    *_, entry = journal(store.layout.root)
    assert (entry.change.op, entry.change.after, entry.change.note) == ("snapshot", digest, "why")
    assert (entry.time, entry.change.agent_id) == (made.created, made.agent_id)
    assert "secret-name" not in store.layout.journal.read_text()


def test_restore_and_its_undo(store: Store) -> None:
    first = commit(store, "a", range(300))
    second = commit(store, "a", range(600))
    done = restore(store, parse_ref("a~1"), wait=0, note="back")
    state = store.resolve(Ref("a"))
    assert (done.before, done.after, state.digest) == (second, done.after, done.after)
    assert (state.manifest.previous, state.manifest.resumes, state.manifest.op) == (second, first, "restore")
    assert read_whole(store, state.manifest) == list(range(300))
    assert resolve(store, "a~1") == second
    assert done.undo is not None
    undone = restore(store, parse_ref(done.undo), wait=0)
    assert picture(store.layout.root) == {"a": list(range(600))}
    assert undone.before == done.after
    assert journal(store.layout.root)[2].change.note == "back"


def test_restoring_what_is_there_moves_nothing(store: Store) -> None:
    commit(store, "a", range(300))
    head = commit(store, "a", range(600))
    snapshot(store, parse_ref("a~1"), "s")
    assert restore(store, Ref("a"), wait=0).undo is None
    once = restore(store, parse_ref("a@s"), wait=0)
    again = restore(store, parse_ref("a@s"), wait=0)
    assert (again.before, again.after, again.undo) == (once.after, once.after, None)
    assert once.before == head
    assert len(journal(store.layout.root)) == 4


def test_restore_expects(store: Store) -> None:
    commit(store, "a", range(300))
    head = commit(store, "a", range(600))
    with pytest.raises(ConflictError, match=head):
        restore(store, parse_ref("a~1"), wait=0, expect="0000")
    assert restore(store, parse_ref("a~1"), wait=0, expect=head[:8]).before == head
    with pytest.raises(NotFoundError):
        restore(store, Ref("b"), wait=0)


def test_forks(store: Store) -> None:
    first = commit(store, "a", range(300))
    commit(store, "a", range(600))
    state = fork(store, parse_ref("a~1"), "b", note="try")
    source = store.agent("a")
    assert (state.manifest.resumes, state.manifest.previous, state.manifest.op) == (first, None, "fork")
    assert state.agent.id == state.manifest.agent != source.id
    assert state.agent.domain == source.domain
    commit(store, "b", range(310))
    assert picture(store.layout.root) == {"a": list(range(600)), "b": list(range(310))}
    assert resolve(store, "b~1") == state.digest
    assert resolve(store, f"b@sha256:{first}") == first  # what it came from
    with pytest.raises(NotFoundError):
        resolve(store, f"b@sha256:{source.manifest}")  # but not where the other went
    for taken in ("a", "b", "A"):
        with pytest.raises(ConflictError):
            fork(store, Ref("b"), taken)


def test_who_waits_for_whom(store: Store) -> None:
    commit(store, "a", range(300))
    commit(store, "a", range(301))
    with store.hold("a", 0):
        snapshot(store, Ref("a"), "s")
        fork(store, Ref("a"), "b")
        with pytest.raises(BusyError, match="agent a is held by process"):
            restore(store, parse_ref("a~1"), wait=0.02)
    with store.hold("c", 0), pytest.raises(BusyError, match="agent c"):
        fork(store, Ref("a"), "c")


def test_no_block_is_written_and_flushes_are_few(store: Store, steps: list[str]) -> None:
    commit(store, "short", range(300))
    commit(store, "long", range(9000))
    counts = []
    for name in ("short", "long"):
        commit(store, name, store.tokens(store.resolve(Ref(name)).manifest)[:-1].tolist())
        blocks = len(list(store.layout.domains.glob("*/blocks/*/*")))
        for act in (
            lambda name=name: fork(store, Ref(name), f"{name}-fork"),
            lambda name=name: restore(store, parse_ref(f"{name}~1"), wait=0),
            lambda name=name: snapshot(store, Ref(name), "s"),
        ):
            steps.clear()
            act()
            counts.append(steps.count("flush"))
        assert len(list(store.layout.domains.glob("*/blocks/*/*"))) == blocks
    assert counts == [6, 6, 4] * 2


def test_a_fork_of_an_incomplete_state_stays_incomplete(store: Store) -> None:
    commit(store, "a", range(300), complete=False)
    assert not fork(store, Ref("a"), "b").manifest.complete
