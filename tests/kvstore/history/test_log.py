from datetime import datetime

import pytest

from kvstore.commit.journal import NO_LINE
from kvstore.errors import DamageError
from kvstore.format.document import replace
from kvstore.format.kinds import MANIFEST
from kvstore.format.manifest import Turn
from kvstore.history.log import Chronicle, Commit, journal_between, journal_head
from kvstore.lifecycle import fork, restore, snapshot
from kvstore.naming import Ref, parse_ref
from kvstore.store import Store
from tests.support.making import commit, journal, put_state


def commits(store: Store, name: str) -> list[Commit]:
    agent = store.agent(name)
    return list(Chronicle(store, agent.domain).commits(agent))


def say(store: Store, name: str, *turns: Turn) -> str:
    """One more state, whose last turn ends where its tokens do."""
    with store.hold(name, 0) as hold:
        agent = hold.agent
        assert agent
        with store.transaction(store.domain(agent.domain)) as txn:
            manifest = put_state(txn, agent.id, agent.manifest, range(turns[-1].end))
            return txn.commit(hold, replace(manifest, turns=turns, op="chat"), agent.manifest)


def test_a_commit_tells_the_turns_that_it_added(store: Store) -> None:
    commit(store, "a", range(300))
    first, second, third = Turn("user", 0, 310), Turn("assistant", 310, 320), Turn("user", 320, 330, "phase")
    say(store, "a", first, second)
    head = say(store, "a", first, second, third)
    newest, middle, oldest = commits(store, "a")
    assert (newest.digest, newest.turns, newest.origin) == (head, (third,), None)
    assert (middle.turns, oldest.turns) == ((first, second), ())


def test_restores_forks_notes_and_snapshots(store: Store) -> None:
    first = commit(store, "a", range(300))
    commit(store, "a", range(310))
    snapshot(store, parse_ref("a~1"), "early")
    restore(store, parse_ref("a~1"), wait=0, note="back again")
    fork(store, parse_ref("a@early"), "b", note="another way")
    head, middle, oldest = commits(store, "a")
    assert (head.manifest.op, head.note, head.origin) == ("restore", "back again", f"a@sha256:{first[:16]}")
    assert (head.turns, middle.note, middle.forks) == ((), None, ())
    assert (oldest.digest, oldest.snapshots, oldest.forks) == (first, ("early",), ("b",))
    [forked] = commits(store, "b")
    assert (forked.origin, forked.note, forked.parent) == (f"a@sha256:{first[:16]}", "another way", first)


def test_the_log_ends_where_gc_has_cut_it(store: Store) -> None:
    digests = [commit(store, "a", range(300 + n)) for n in range(3)]
    store.layout.object(store.agent("a").domain, MANIFEST, digests[0]).unlink()
    assert [commit_.digest for commit_ in commits(store, "a")] == [digests[2], digests[1]]


def test_all_agents_of_a_domain_and_no_others(store: Store) -> None:
    commit(store, "a", range(300))
    fork(store, Ref("a"), "b")
    commit(store, "a", range(310))
    commit(store, "stranger", range(300))
    found = Chronicle(store, store.agent("a").domain).all()
    assert [commit_.agent for commit_ in found] == ["a", "b", "a"]
    assert [commit_.manifest.created for commit_ in found] == sorted(
        (commit_.manifest.created for commit_ in found), reverse=True
    )


def test_a_damaged_journal_costs_the_notes_only(store: Store) -> None:
    commit(store, "a", range(300))
    store.layout.journal.write_bytes(b"x" + store.layout.journal.read_bytes())
    assert [commit_.note for commit_ in commits(store, "a")] == [None]
    with pytest.raises(DamageError):
        journal_between(store.layout.journal, None, None)


def test_the_journal_between_two_times(store: Store) -> None:
    for n in range(4):
        commit(store, "a", range(3 + n))
    entries = journal(store.layout.root)
    second, third = (datetime.fromisoformat(entry.time) for entry in entries[1:3])
    path = store.layout.journal
    assert journal_between(path, None, None) == entries[::-1]
    assert journal_between(path, second, third) == entries[2:0:-1]
    assert journal_between(path, third, second) == []


def test_the_journal_head_is_what_the_next_line_holds(store: Store) -> None:
    assert journal_head(store.layout.journal).digest == NO_LINE
    commit(store, "a", range(3))
    head = journal_head(store.layout.journal)
    assert (head.entries, head.bytes) == (1, store.layout.journal.stat().st_size)
    commit(store, "a", range(4))
    assert journal(store.layout.root)[1].prev == head.digest
