import os
import sqlite3
from pathlib import Path

import pytest

from kvstore.errors import ConflictError, DamageError, NotFoundError
from kvstore.format.document import replace
from kvstore.format.kinds import MANIFEST
from kvstore.format.layers import block_parts
from kvstore.naming import new_id
from kvstore.store import Store
from tests.support.making import CODEC, FULL, block_content, commit, header, journal, picture, put_state


def block_files(store: Store) -> list[Path]:
    return sorted(store.layout.domains.glob("*/blocks/*/*"))


def test_a_turn_writes_what_is_new(store: Store) -> None:
    commit(store, "a", range(1000))
    with store.hold("a", 0) as hold:
        assert hold.agent
        with store.transaction(store.domain(hold.agent.domain)) as txn:
            manifest = put_state(txn, hold.agent.id, hold.agent.manifest, range(1100))
            digest = txn.commit(hold, manifest, hold.agent.manifest)
            assert hold.agent.manifest == digest
            assert txn.new_blocks == 2  # the one block that has filled up, of two layer groups
            assert manifest.tail
            known = txn.block_bytes + manifest.tail.bytes + sum(page.bytes for page in manifest.pages)
            path = store.layout.object(manifest.domain, MANIFEST, digest)
            assert txn.bytes_written == known + path.stat().st_size


def flushes(store: Store, steps: list[str], name: str, tokens: range) -> int:
    before = steps.count("flush")
    commit(store, name, tokens)
    return steps.count("flush") - before


def test_a_turn_without_new_blocks_flushes_a_fixed_number_of_times(store: Store, steps: list[str]) -> None:
    commit(store, "short", range(300))
    commit(store, "long", range(9000))
    short = {flushes(store, steps, "short", range(301 + n)) for n in range(5)}
    long = {flushes(store, steps, "long", range(9001 + n)) for n in range(5)}
    assert short == {12}  # tail, page, manifest: each its file, folder and parent; journal; ref and its folder
    assert long == short


def test_blocks_are_shared_inside_a_domain_only(store: Store) -> None:
    team = store.create_domain("team")
    commit(store, "a", range(600), team)
    count = len(block_files(store))
    commit(store, "b", range(600), team)
    assert len(block_files(store)) == count
    commit(store, "c", range(600))
    assert len(block_files(store)) == 2 * count


def test_one_key_may_stand_for_several_blocks(store: Store) -> None:
    """Computed in other steps a block differs; the first committed one is found."""
    team = store.create_domain("team")
    keys = ["a" * 64]
    found = []
    for name, seed in (("one", "1"), ("two", "2"), ("three", "1")):
        with store.hold(name, 0) as hold, store.transaction(team) as txn:
            buffers = block_content(range(256), seed, FULL, 0)
            row = txn.put_block(header(team, FULL, keys, 0), buffers, block_parts(FULL, CODEC, 0))
            manifest = replace(put_state(txn, new_id(), None, range(3)), window_blocks=(row,))
            txn.commit(hold, manifest, None)
            found.append((row, *txn.find(keys)))
    (first, one), (second, two), (third, three) = found
    assert one == two == three == first == third != second
    assert len(block_files(store)) == 2


def test_a_damaged_block_is_healed(store: Store) -> None:
    team = store.create_domain("team")
    commit(store, "a", range(300), team)
    for path in block_files(store):
        path.chmod(0o600)
        path.write_bytes(b"")
    with pytest.raises(DamageError):
        picture(store.layout.root)
    commit(store, "b", range(300), team)
    assert picture(store.layout.root) == {"a": list(range(300)), "b": list(range(300))}


@pytest.mark.parametrize("damage", ["missing", "empty", "garbage", "malformed"])
def test_the_index_is_disposable(store: Store, damage: str) -> None:
    team = store.create_domain("team")
    commit(store, "a", range(600), team)
    index = store.layout.index
    if damage == "missing":
        index.unlink()
    elif damage == "malformed":
        index.write_bytes(index.read_bytes()[:5000] + bytes(3000))
    else:
        index.write_bytes(b"" if damage == "empty" else os.urandom(9000))
    count = len(block_files(store))
    with store.hold("b", 0) as hold, store.transaction(team) as txn:
        txn.commit(hold, put_state(txn, new_id(), None, range(600)), None)
        assert txn.new_blocks == 0  # what the manifests list is found again
    assert len(block_files(store)) == count
    assert index.stat().st_mode & 0o777 == 0o600


def test_a_locked_index_costs_no_commit(store: Store) -> None:
    commit(store, "a", range(300))
    db = sqlite3.connect(store.layout.index, isolation_level=None)
    db.execute("BEGIN EXCLUSIVE")
    commit(store, "a", range(3))
    db.close()
    assert picture(store.layout.root) == {"a": list(range(3))}


def test_what_is_used_is_pinned(store: Store) -> None:
    team = store.create_domain("team")
    commit(store, "a", range(300), team)
    agent = store.agent("a")
    manifest = store.manifest(agent.domain, agent.manifest)
    rows = store.blocks(manifest)
    with store.transaction(team) as txn:
        txn.find([rows[0].prefix_key])
        txn.pin(manifest.pages)
        (pins,) = store.layout.staging.glob("*/pins")
        assert pins.read_text().split() == [team.id, rows[0].sha256, manifest.pages[0].sha256]


def test_a_block_that_has_gone_is_not_found(store: Store) -> None:
    team = store.create_domain("team")
    commit(store, "a", range(300), team)
    for path in block_files(store):
        path.unlink()
    commit(store, "b", range(300), team)
    assert picture(store.layout.root)["b"] == list(range(300))


@pytest.mark.parametrize("kind", ["blocks", "tails", "pages"])
def test_what_goes_before_the_commit_is_noticed(store: Store, kind: str) -> None:
    team = store.create_domain("team")
    commit(store, "a", range(300), team)
    tail = store.manifest(team.id, store.agent("a").manifest).tail
    with store.hold("b", 0) as hold, store.transaction(team) as txn:
        manifest = put_state(txn, new_id(), None, range(300))
        assert manifest.tail == tail
        for path in store.layout.domain(team.id).glob(f"{kind}/*/*"):
            path.unlink()
        with pytest.raises(DamageError, match="was deleted while it was in use"):
            txn.commit(hold, manifest, None)
    assert [agent.name for agent in store.agents()] == ["a"]


def test_a_resumed_state_that_has_gone(store: Store) -> None:
    team = store.create_domain("team")
    with store.hold("a", 0) as hold, store.transaction(team) as txn:
        manifest = replace(put_state(txn, new_id(), None, range(3)), resumes="0" * 64)
        with pytest.raises(NotFoundError, match="removed"):
            txn.commit(hold, manifest, None)


def test_the_head_is_compared(store: Store) -> None:
    digest = commit(store, "a", range(3))
    with store.hold("a", 0) as hold:
        assert hold.agent
        with store.transaction(store.domain(hold.agent.domain)) as txn:
            manifest = put_state(txn, hold.agent.id, digest, range(4))
            for before in (None, "0" * 64):
                with pytest.raises(ConflictError, match="has moved"):
                    txn.commit(hold, manifest, before)
            txn.commit(hold, manifest, digest)
    assert [entry.change.before for entry in journal(store.layout.root)] == [None, digest]


def test_a_hold_that_was_given_back(store: Store) -> None:
    with store.hold("a", 0) as hold:
        pass
    with store.transaction(store.create_domain()) as txn, pytest.raises(ValueError, match="lock"):
        txn.commit(hold, put_state(txn, new_id(), None, range(3)), None)


def test_folders_of_dead_writers_are_swept(store: Store) -> None:
    dead = store.layout.transaction(new_id())
    dead.mkdir()
    (dead / "pins").write_text("x\n")
    with store.transaction(store.create_domain()), store.transaction(store.create_domain()):
        assert not dead.exists()
        assert len(list(store.layout.staging.iterdir())) == 2
    assert list(store.layout.staging.iterdir()) == []
