"""Evictions: the least recently used agents give up their blocks, and keep their tokens."""

from kvstore.gc.evict import evict
from kvstore.graph.roots import read_root
from kvstore.lifecycle import fork, snapshot
from kvstore.naming import parse_ref
from kvstore.store import Store
from tests.support.collecting import collect
from tests.support.making import ACTOR, commit, picture, read_whole

A, B, C = (list(range(start, start + 1200)) for start in (0, 5000, 9000))


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
