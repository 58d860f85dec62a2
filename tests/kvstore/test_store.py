import shutil
from pathlib import Path

import pytest

from kvstore.errors import (
    AmemError,
    ConflictError,
    DamageError,
    IsolationError,
    NoStoreError,
    NotFoundError,
    UsageError,
)
from kvstore.format.document import encode, replace
from kvstore.format.kinds import BLOCK
from kvstore.format.layers import block_parts
from kvstore.format.layout import StoreLayout
from kvstore.format.manifest import Manifest, Page
from kvstore.format.records import SnapshotRef
from kvstore.naming import new_id, parse_ref
from kvstore.store import Store
from tests.support.making import (
    ACTOR,
    CODEC,
    FULL,
    WINDOW,
    block_content,
    buffers_for,
    commit,
    header,
    picture,
    put_state,
    read_whole,
)


def head(store: Store, name: str) -> Manifest:
    agent = store.agent(name)
    return store.manifest(agent.domain, agent.manifest)


def test_an_agent_reads_back(store: Store) -> None:
    digest = commit(store, "a", range(9000))
    agent = store.agent("a")
    assert (agent.manifest, agent.created) == (digest, agent.updated)
    manifest = head(store, "a")
    assert (manifest.pending, len(manifest.pages)) == (1, 3)
    assert read_whole(store, manifest) == list(range(9000))
    groups = [row.group for row in store.blocks(manifest)]
    assert groups.count(FULL.id) == 35
    assert groups.count(WINDOW.id) == 2  # what a window of 300 tokens still reaches
    assert store.tokens(manifest).dtype == "int32"


def test_names_are_digests(store: Store) -> None:
    commit(store, "a", range(300))
    for path in store.layout.domains.glob("*/*/*/*"):
        assert path.parent.name == path.name[:2]
    assert {path.stat().st_mode & 0o777 for path in store.layout.domains.glob("*/blocks/*/*")} == {0o400}


def test_everything_is_private(store: Store) -> None:
    commit(store, "a", range(300))
    for path in store.layout.root.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path


def test_reading_changes_nothing(store: Store, steps: list[str]) -> None:
    commit(store, "a", range(300))
    steps.clear()
    root = store.layout.root
    assert picture(root) == {"a": list(range(300))}
    reader = Store.open(root, ACTOR)
    reader.resolve(parse_ref("a~0"))
    assert reader.domains()
    assert steps == []


@pytest.mark.parametrize("content", [None, b"", b"{}", b"not json", b"\xff"])
def test_no_store(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "format.json").write_bytes(content)
    with pytest.raises(NoStoreError):
        Store.open(tmp_path, ACTOR)


@pytest.mark.parametrize(("old", "new"), [(b'"format":1', b'"format":2'), (b'"features":[]', b'"features":["x"]')])
def test_another_versions_store(store: Store, old: bytes, new: bytes) -> None:
    data = store.layout.format.read_bytes()
    assert old in data
    store.layout.format.write_bytes(data.replace(old, new))
    for opener in (Store.open, Store.open_or_create):
        with pytest.raises(NoStoreError, match="another version"):
            opener(store.layout.root, ACTOR)


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(NoStoreError, match="other entries"):
        Store.open_or_create(tmp_path, ACTOR)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_is_no_store(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(NoStoreError):
        Store.open(path, ACTOR)
    with pytest.raises(AmemError, match="could not read"):
        Store.open_or_create(path, ACTOR)


def test_a_store_keeps_its_id(store: Store) -> None:
    assert Store.open_or_create(store.layout.root, ACTOR).id == store.id


def test_not_found_tells_close_names(store: Store) -> None:
    commit(store, "alice", range(3))
    with pytest.raises(NotFoundError, match="no such agent: alise") as caught:
        store.agent("alise")
    assert caught.value.hint == "did you mean alice?"
    with pytest.raises(NotFoundError) as caught:
        store.agent("ALICE")
    assert caught.value.hint == "did you mean alice?"


def test_names_that_differ_by_case_only(store: Store) -> None:
    commit(store, "alice", range(3))
    with pytest.raises(ConflictError, match="agent alice exists already"):
        commit(store, "Alice", range(3))
    store.create_domain("team")
    with pytest.raises(ConflictError, match="domain team exists already"):
        store.create_domain("Team")
    with pytest.raises(UsageError):
        store.create_domain("../up")


def test_domains(store: Store) -> None:
    team = store.create_domain("team")
    assert store.create_domain("team") == store.domain_named("team") == store.domain(team.id) == team
    assert store.create_domain() != store.create_domain()
    assert store.domains() == [team]  # an unnamed one is written with its first agent
    with pytest.raises(NotFoundError, match="no such domain: tema"):
        store.domain_named("tema")
    with pytest.raises(NotFoundError):
        store.domain("0" * 32)


def test_a_failed_first_commit_leaves_no_domain(store: Store) -> None:
    with pytest.raises(RuntimeError), store.hold("a", 0), store.transaction(store.create_domain()) as txn:
        put_state(txn, new_id(), None, range(300))
        raise RuntimeError
    assert store.domains() == []
    assert list(store.layout.domains.iterdir()) == list(store.layout.staging.iterdir()) == []


@pytest.mark.parametrize("kind", ["manifests", "pages", "tails", "blocks"])
@pytest.mark.parametrize("damage", ["flip", "empty", "missing"])
def test_damage_is_found_and_named(store: Store, kind: str, damage: str) -> None:
    commit(store, "a", range(300))
    commit(store, "b", range(300))
    (path,) = (
        store.layout.domain(store.agent("a").domain).glob(f"{kind}/*/*")
        if kind != "blocks"
        else [next(store.layout.domain(store.agent("a").domain).glob("blocks/*/*"))]
    )
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.chmod(0o600)
    path.write_bytes(data if damage == "flip" else b"")
    if damage == "missing":
        path.unlink()
    with pytest.raises(DamageError, match=f"{kind[:-1]} sha256:{path.stem}"):
        read_whole(store, head(store, "a"))
    assert read_whole(store, head(store, "b")) == list(range(300))


def test_a_damaged_ref_is_named(store: Store) -> None:
    commit(store, "a", range(3))
    commit(store, "b", range(3))
    store.layout.agent_ref("a").write_bytes(b"{")
    with pytest.raises(DamageError, match="refs/agents/a"):
        store.agent("a")
    commit(store, "b", range(4))
    assert read_whole(store, head(store, "b")) == list(range(4))


def test_pages_that_do_not_hold_the_tokens(store: Store) -> None:
    commit(store, "a", range(5000))
    manifest = head(store, "a")
    with pytest.raises(DamageError, match="pages hold"):
        store.tokens(replace(manifest, tokens=4999))
    with pytest.raises(DamageError, match="does not follow"):
        store.tokens(replace(manifest, pages=manifest.pages[::-1]))


def test_another_domains_files_are_a_breach(store: Store) -> None:
    """Copied to where the other domain would read them, under the names that it expects or under their own."""
    commit(store, "a", range(300))
    commit(store, "b", range(300))
    mine, foreign = head(store, "a"), head(store, "b")
    own, other = store.blocks(mine)[0], store.blocks(foreign)[0]
    parts = block_parts(FULL, CODEC, 0)
    source = store.layout.object(foreign.domain, BLOCK, other.sha256)
    for row, name in ((other, other.sha256), (own, own.sha256)):
        target = store.layout.object(mine.domain, BLOCK, name)
        target.parent.mkdir(exist_ok=True)
        target.unlink(missing_ok=True)
        shutil.copyfile(source, target)
        with pytest.raises(IsolationError, match=f"block sha256:{name}"):
            store.read_block(mine.domain, row, parts, buffers_for(parts))
    with pytest.raises(IsolationError):
        store.tokens(replace(mine, salt="another"))
    for kind, digest in (("manifests", store.agent("b").manifest),):
        name = f"{kind}/{digest[:2]}/{digest}.json"
        target = store.layout.domain(mine.domain) / name
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(store.layout.domain(foreign.domain) / name, target)
        with pytest.raises(IsolationError):
            store.manifest(mine.domain, digest)


def test_a_flipped_bit_in_the_domain_is_damage(store: Store) -> None:
    commit(store, "a", range(300))
    manifest = head(store, "a")
    row = store.blocks(manifest)[0]
    path = store.layout.object(manifest.domain, BLOCK, row.sha256)
    path.chmod(0o600)
    digit = b"0" if manifest.domain[0] != "0" else b"1"
    path.write_bytes(path.read_bytes().replace(manifest.domain.encode(), digit + manifest.domain[1:].encode()))
    with pytest.raises(DamageError, match="checksum"):
        read_whole(store, manifest)


def test_a_row_that_names_another_block(store: Store) -> None:
    commit(store, "a", range(600))
    manifest = head(store, "a")
    first, second = store.blocks(manifest)[:2]
    mixed = replace(first, position=second.position, prefix_key=second.prefix_key)
    parts = block_parts(FULL, CODEC, 0)
    with pytest.raises(DamageError, match="does not match its row"):
        store.read_block(manifest.domain, mixed, parts, buffers_for(parts))


def test_files_of_another_domain_are_not_stored(store: Store) -> None:
    home, other = store.create_domain("home"), store.create_domain("other")
    keys = ["k" * 64]
    with store.hold("a", 0) as hold, store.transaction(home) as txn:
        with pytest.raises(IsolationError):
            buffers = block_content(range(256), keys[0], FULL, 0)
            txn.put_block(header(other, FULL, keys, 0), buffers, block_parts(FULL, CODEC, 0))
        with pytest.raises(IsolationError):
            txn.put_page(Page(0, (1,), (), other.salt))
        manifest = put_state(txn, new_id(), None, range(3))
        with pytest.raises(IsolationError):
            txn.commit(hold, replace(manifest, domain=other.id), None)
    assert store.agents() == []


def test_an_agent_cannot_change_its_domain(store: Store) -> None:
    commit(store, "a", range(3))
    with store.hold("a", 0) as hold, store.transaction(store.create_domain()) as txn:
        assert hold.agent
        manifest = put_state(txn, hold.agent.id, hold.agent.manifest, range(4))
        with pytest.raises(ConflictError):
            txn.commit(hold, manifest, hold.agent.manifest)


def test_a_name_used_again_does_not_reach_older_snapshots(store: Store) -> None:
    commit(store, "a", range(3))
    agent = store.agent("a")
    store.layout.snapshot_folder("a").mkdir()
    left = SnapshotRef("a", "s", new_id(), agent.domain, agent.manifest, None, agent.created)
    store.layout.snapshot_ref("a", "s").write_bytes(encode(left))
    assert store.snapshots("a") == []
    with pytest.raises(NotFoundError):
        store.resolve(parse_ref("a@s"))


def test_a_layout_keeps_names_out_of_lock_files() -> None:
    layout = StoreLayout(Path("root"))
    assert layout.agent_lock("Alice") == layout.agent_lock("alice") != layout.agent_lock("bob")
    assert "alice" not in layout.agent_lock("Alice").name
