from kvstore.format.codecs import CODECS, DEFAULT_CODEC
from kvstore.format.document import replace
from kvstore.format.manifest import ModelIdentity, Turn
from kvstore.history.diff import Difference, TurnAt, compare, tokens_from
from kvstore.lifecycle import fork
from kvstore.naming import Ref, parse_ref
from kvstore.store import Store
from tests.support.making import commit


def difference(store: Store, a: str, b: str) -> Difference:
    return compare(store, store.resolve(parse_ref(a)), store.resolve(parse_ref(b)))


def test_a_state_equals_itself(store: Store) -> None:
    commit(store, "a", range(600))
    found = difference(store, "a", "a")
    assert (found.common_tokens, found.parted_at, found.model_parts) == (600, None, {})
    assert (found.a.blocks, found.b.bytes, found.a.turn) == (0, 0, None)
    assert found.shared_blocks == 3  # two of full attention, and one that the window reaches


def test_forks_part_and_share_what_came_before(store: Store) -> None:
    commit(store, "a", range(600))
    fork(store, Ref("a"), "b")
    commit(store, "a", [*range(600), *range(1000)])
    commit(store, "b", [*range(600), *range(5, 800)])
    found = difference(store, "a", "b")
    assert (found.common_tokens, found.parted_at, found.shared_blocks) == (600, 600, 2)
    rows = {row.sha256 for row in store.blocks(found.a.state.manifest)}
    others = {row.sha256: row for row in store.blocks(found.b.state.manifest)}
    assert found.shared_bytes == sum(others[sha256].bytes for sha256 in rows & others.keys())
    assert (found.a.blocks, found.b.blocks) == (len(rows) - 2, len(others) - 2)


def test_one_that_goes_on_parts_where_the_other_ends(store: Store) -> None:
    commit(store, "a", range(600))
    commit(store, "a", range(5000))
    found = difference(store, "a~1", "a")
    assert (found.common_tokens, found.parted_at) == (600, 600)
    assert difference(store, "a", "a").common_tokens == 5000  # two pages


def test_domains_share_tokens_but_no_blocks(store: Store) -> None:
    commit(store, "a", range(600))
    commit(store, "b", range(600))
    found = difference(store, "a", "b")
    assert (found.common_tokens, found.parted_at, found.shared_blocks) == (600, None, 0)
    assert found.a.blocks == found.b.blocks == 3


def test_turns_models_and_codecs(store: Store) -> None:
    commit(store, "a", range(10))
    commit(store, "b", [*range(7), 1, 1])
    a, b = (store.resolve(Ref(name)) for name in "ab")
    turns = (Turn("user", 0, 5), Turn("assistant", 5, 10, "plan"))
    other = ModelIdentity("other", "0" * 64, {"weights": "b" * 64, "adapter": "c" * 64})
    a = replace(a, manifest=replace(a.manifest, turns=turns))
    b = replace(b, manifest=replace(b.manifest, model=other, codec=CODECS["q8-token"]))
    found = compare(store, a, b)
    assert (found.parted_at, found.a.turn, found.b.turn) == (7, TurnAt(1, "assistant", "plan"), None)
    assert found.model_parts == {"weights": ("a" * 64, "b" * 64), "adapter": (None, "c" * 64)}
    assert (found.a.codec.name, found.b.codec.name) == (DEFAULT_CODEC, "q8-token")


def test_tokens_from_a_position_on(store: Store) -> None:
    commit(store, "a", range(5000))
    manifest = store.resolve(Ref("a")).manifest
    for start in (0, 4095, 4096, 4999, 5000):
        assert tokens_from(store, manifest, start) == list(range(start, 5000))
