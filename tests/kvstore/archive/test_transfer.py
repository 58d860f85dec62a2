import io
import os
import signal
import sys
import tarfile
from hashlib import sha256
from pathlib import Path

import pytest

from kvstore.archive.import_agent import import_agent
from kvstore.archive.tar import LISTING
from kvstore.disk import files
from kvstore.errors import ConflictError, DamageError
from kvstore.format.kinds import BLOCK
from kvstore.format.layers import block_parts, tail_parts
from kvstore.lifecycle import fork, restore
from kvstore.naming import Ref, parse_ref
from kvstore.remove.remove import remove
from kvstore.store import Store
from tests.support.archives import exported, files_below, imported, packed, unpacked
from tests.support.faults.scenarios import at_mutation
from tests.support.making import ACTOR, buffers_for, commit, fast_folder, journal, picture, read_whole
from tests.support.running import children


def read_tokens(store: Store, ref: str) -> list[int]:
    """The tokens of a state, once all its files are read and checked."""
    manifest = store.resolve(parse_ref(ref)).manifest
    for row in store.blocks(manifest):
        parts = block_parts({group.id: group for group in manifest.groups}[row.group], manifest.codec, row.position)
        store.read_block(manifest.domain, row, parts, buffers_for(parts))
    if manifest.tail:
        parts = tail_parts(manifest.groups, manifest.codec, manifest.cached)
        store.read_tail(manifest, parts, buffers_for(parts))
    tokens: list[int] = store.tokens(manifest).tolist()
    return tokens


def test_one_state_arrives_whole(agent: Store, other: Store) -> None:
    data = exported(agent, "a")
    made = imported(other, data)
    source, state = agent.resolve(Ref("a")), other.resolve(Ref("a"))
    assert (made.agent, made.agent_id, made.tokens, made.states) == ("a", source.agent.id, 1000, 1)
    assert made.domain == agent.domain(source.agent.domain)
    assert read_whole(other, state.manifest) == list(range(1000))
    assert (state.manifest.op, state.manifest.resumes) == ("import", source.digest)
    assert other.resolve(parse_ref("a~1")).manifest == source.manifest  # the very same state
    here, there = files_below(agent), files_below(other)
    assert len([path for path in there if path not in here]) == 1  # the new head
    assert journal(other.layout.root)[-1].change.op == "import"
    commit(other, "a", range(1100))
    restore(other, parse_ref(f"a@sha256:{source.digest}"), wait=0)
    assert picture(other.layout.root) == {"a": list(range(1000))}


def test_an_archive_is_a_tar_and_follows_from_its_state(agent: Store, other: Store) -> None:
    data = exported(agent, "a", lineage=True)
    assert exported(agent, "a", lineage=True) == data
    members = unpacked(data)
    assert members[0][0] == LISTING
    assert all(sha256(content).hexdigest() in name for name, content in members[1:])
    assert packed(members) == data
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert {(member.mode, member.mtime, member.uid, member.type) for member in tar} == {(0o600, 0, 0, b"0")}
    imported(other, data)
    assert exported(other, f"a@sha256:{agent.agent('a').manifest}") == exported(agent, "a")


def test_a_lineage_brings_history_and_snapshots(agent: Store, other: Store) -> None:
    made = imported(other, exported(agent, "a", lineage=True))
    assert (made.states, made.snapshots) == (3, 1)
    assert [other.resolve(parse_ref(f"a~{n}")).manifest.tokens for n in range(4)] == [1000, 1000, 700, 600]
    assert other.snapshot("a", "s") == agent.snapshot("a", "s")
    assert read_whole(other, other.resolve(parse_ref("a@s")).manifest) == list(range(700))
    remove(other, parse_ref("a@s"), wait=0)
    assert other.snapshots("a") == []


def test_an_earlier_state_and_a_snapshot_can_be_exported(agent: Store, other: Store) -> None:
    imported(other, exported(agent, "a@s"), "early")
    imported(other, exported(agent, "a~2", lineage=True), "first", as_new=True)
    assert picture(other.layout.root) == {"early": list(range(700)), "first": list(range(600))}


def test_the_domain_of_a_store_is_shared_again(agent: Store) -> None:
    blocks = len(list(agent.layout.domains.glob("*/blocks/*/*")))
    data = exported(agent, "a", lineage=True)
    with pytest.raises(ConflictError, match="already, as a"):
        imported(agent, data, "b")
    made = imported(agent, data, "b", as_new=True)
    assert (made.new_blocks, made.domain.id) == (0, agent.agent("a").domain)
    assert made.agent_id != agent.agent("a").id
    assert len(list(agent.layout.domains.glob("*/blocks/*/*"))) == blocks
    assert [agent.resolve(parse_ref(f"b~{n}")).manifest.agent for n in range(4)] == [made.agent_id] * 4
    assert agent.snapshot("b", "s").agent_id == made.agent_id
    with pytest.raises(ConflictError, match="agent a exists already"):
        imported(agent, data, as_new=True)


def test_another_domain_gets_headers_and_keys_of_its_own(agent: Store, other: Store) -> None:
    home = other.create_domain("team")
    commit(other, "native", range(1000), home)
    made = imported(other, exported(agent, "a", lineage=True), domain="team")
    assert made.domain == home
    for text, tokens in {"a": 1000, "a@s": 700, "a~1": 1000, "a~3": 600}.items():
        assert read_tokens(other, text) == list(range(tokens))
    native, moved = (other.blocks(other.resolve(Ref(name)).manifest) for name in ("native", "a"))
    assert [row.prefix_key for row in native] == [row.prefix_key for row in moved]
    salt = agent.domain(agent.agent("a").domain).salt.encode()
    assert not any(salt in content for content in files_below(other).values())


def test_blocks_keep_their_codes_in_another_domain(agent: Store, other: Store) -> None:
    imported(other, exported(agent, "a"), domain="team")
    codes = []
    for store in (agent, other):
        manifest = store.resolve(Ref("a")).manifest
        paths = [store.layout.object(manifest.domain, BLOCK, row.sha256) for row in store.blocks(manifest)]
        codes.append([path.read_bytes()[4096:] for path in paths])
    assert codes[0] == codes[1]


def test_a_fork_leaves_its_origin_behind(agent: Store, other: Store) -> None:
    fork(agent, parse_ref("a@s"), "b")
    commit(agent, "b", range(710))
    made = imported(other, exported(agent, "b", lineage=True))
    assert made.states == 2
    assert picture(other.layout.root) == {"b": list(range(710))}
    origin = parse_ref(f"b@sha256:{agent.resolve(parse_ref('a@s')).digest}")
    assert imported(other, exported(agent, str(origin)), "origin", as_new=True).tokens == 700


def test_a_named_domain_comes_with_its_name(store: Store, other: Store) -> None:
    commit(store, "a", range(300), store.create_domain("team"))
    data = exported(store, "a")
    other.create_domain("Team")
    with pytest.raises(ConflictError, match="another domain team"):
        imported(other, data)
    assert imported(other, data, domain="Team").domain.name == "Team"
    third = Store.open_or_create(other.layout.root.parent / "third", ACTOR)
    assert imported(third, data).domain == store.domain_named("team")


def test_what_was_erased_does_not_return(agent: Store) -> None:
    data = exported(agent, "a")
    remove(agent, Ref("a"), wait=0, erase=True)
    for options in ({}, {"as_new": True}, {"domain": "team"}):
        with pytest.raises(ConflictError, match="erased"):
            imported(agent, data, "b", **options)
    assert agent.agents() == []


def test_a_removed_agent_does(agent: Store) -> None:
    data = exported(agent, "a")
    remove(agent, Ref("a"), wait=0)
    assert imported(agent, data).new_blocks == 0


def test_incomplete_states_stay_incomplete(store: Store, other: Store) -> None:
    commit(store, "a", range(300), complete=False)
    imported(other, exported(store, "a"))
    state = other.resolve(Ref("a")).manifest
    assert (state.complete, state.previous) == (False, None)


def test_a_damaged_file_is_not_exported(agent: Store) -> None:
    state = agent.resolve(Ref("a"))
    path = agent.layout.object(state.agent.domain, BLOCK, agent.blocks(state.manifest)[0].sha256)
    path.unlink()
    with pytest.raises(DamageError, match="is missing"):
        exported(agent, "a")
    path.write_bytes(b"")
    with pytest.raises(DamageError):
        exported(agent, "a")


@pytest.mark.long
def test_an_import_that_is_killed_anywhere_leaves_no_agent(agent: Store) -> None:
    data = exported(agent, "a", lineage=True)
    whole = {"a": list(range(1000)), "a@s": list(range(700))}
    with fast_folder() as folder:
        (folder / "archive").write_bytes(data)
        children.run(sys.executable, "-m", "tests.kvstore.archive.test_transfer", folder, check=True)
        roots = sorted(path for path in folder.iterdir() if path.is_dir())
        for root in roots:
            held = picture(root)
            assert held in ({}, whole)
            if not held:
                store = Store.open_or_create(root, ACTOR)
                imported(store, data)
                assert picture(root) == whole
                assert list(store.layout.staging.iterdir()) == []
    assert len(roots) > 20


def main(folder: Path) -> None:
    """Import FOLDER/archive into new stores FOLDER/0, 4, 8, ..., each time killed that many mutations later."""
    number, killed = 0, True
    while killed:
        child = os.fork()
        if not child:
            files.fault = at_mutation(number, lambda _: os.kill(os.getpid(), signal.SIGKILL))
            with (folder / "archive").open("rb") as stream:
                import_agent(Store.open_or_create(folder / str(number), ACTOR), stream)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status):
            sys.exit("the import failed by itself")
        killed, number = os.WIFSIGNALED(status), number + 4


if __name__ == "__main__":
    main(Path(sys.argv[1]))
