"""`snapshot`, `restore`, `fork` and `inspect` on real stores."""

from pathlib import Path

import pytest

from kvstore.format.kinds import BLOCK, MANIFEST, PAGE, TAIL
from kvstore.naming import Ref
from kvstore.store import Store
from tests.commands.conftest import ACTOR, GROUP, put_state
from tests.support.running.amem import Amem, lines

AGENT_KEYS = (
    "type name id domain model head parent note tokens blocks bytes own_bytes shared_bytes snapshots complete",
    "created updated",
)


def head(store: Store, name: str = "a") -> str:
    return store.agent(name).manifest


def files_below(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


@pytest.mark.usefixtures("store")
def test_a_snapshot_is_named_and_named_again(amem: Amem) -> None:
    first = amem("snapshot", "a", "s", "--note", "why")
    assert (first.returncode, first.stdout) == (0, "a@s\n")
    again = amem("--json", "snapshot", "a", "s")
    [result] = lines(again)
    assert (again.returncode, result["ref"], result["is_new"], result["note"]) == (0, "a@s", False, "why")
    other = amem("snapshot", "a~1", "s")
    assert other.returncode == 5
    assert other.stdout == ""


@pytest.mark.usefixtures("store")
def test_a_snapshot_without_a_name_gets_one(amem: Amem) -> None:
    assert amem("snapshot", "a").stdout == "a@s1\n"
    assert amem("snapshot", "a~1").stdout == "a@s2\n"


def test_restore_tells_the_command_that_undoes_it(amem: Amem, store: Store) -> None:
    before = head(store)
    tokens = store.resolve(Ref("a", back=1)).manifest.tokens
    done = amem("restore", "a~1")
    assert (done.returncode, done.stdout) == (0, "a\n")
    assert store.resolve(Ref("a")).manifest.tokens == tokens
    [undo] = [line.removeprefix("undo: amem ") for line in done.stderr.splitlines() if line.startswith("undo: ")]
    undone = amem("--json", *undo.split())
    [result] = lines(undone)
    assert (undone.returncode, result["after"]) == (0, f"sha256:{head(store)}")
    assert store.resolve(Ref("a")).manifest.tokens == 700
    assert store.resolve(Ref("a")).manifest.resumes == before


@pytest.mark.usefixtures("store")
def test_restore_to_the_head_changes_nothing(amem: Amem) -> None:
    done = amem("--json", "restore", "a")
    [result] = lines(done)
    assert (done.returncode, result["before"], result["undo"]) == (0, result["after"], None)


@pytest.mark.parametrize(("prefix", "code"), [("sha256:" + "0" * 8, 5), ("0" * 8, 2)])
def test_restore_expects_a_head(amem: Amem, store: Store, prefix: str, code: int) -> None:
    before = head(store)
    assert amem("restore", "a~1", "--expect", prefix).returncode == code
    assert head(store) == before
    assert amem("restore", "a~1", "--expect", f"sha256:{before[:12]}").returncode == 0


def test_restore_of_a_busy_agent_names_the_holder(amem: Amem, store: Store) -> None:
    with store.hold("a", wait=1):
        refused = amem("--json", "restore", "a~1", "--wait", "0")
        assert refused.returncode == 11
        assert lines(refused)[-1]["code"] == "busy"
        assert "process" in refused.stderr
        assert amem("snapshot", "a", "s").returncode == 0  # takes the last commit, and never waits
        assert amem("fork", "a", "b").returncode == 0


def test_a_fork_shares_every_block(amem: Amem, store: Store) -> None:
    done = amem("fork", "a~1", "b", "--note", "another way")
    assert (done.returncode, done.stdout) == (0, "b\n")
    by_name = {line["name"]: line for line in lines(amem("inspect", "--json")) if line["type"] == "agent"}
    assert by_name["b"]["tokens"] == 300
    assert by_name["b"]["parent"] == f"sha256:{store.resolve(Ref('a', back=1)).digest}"
    assert by_name["b"]["note"] == "another way"
    assert by_name["b"]["shared_bytes"] > 0
    assert by_name["b"]["own_bytes"] < by_name["b"]["shared_bytes"]  # its own manifest only
    assert amem("fork", "a", "b").returncode == 5
    assert amem("fork", "a", "B").returncode == 5


def test_inspect_lists_agents_as_it_says(amem: Amem, store: Store) -> None:
    put_state(store, "b", range(10, 600), complete=False)
    done = amem("inspect", "--json")
    *agents, result = lines(done)
    assert [" ".join(agent) for agent in agents] == [" ".join(AGENT_KEYS)] * 2
    a, b = agents
    assert (a["type"], a["name"], a["tokens"], a["blocks"], a["complete"]) == ("agent", "a", 700, 2, True)
    assert (b["name"], b["blocks"], b["complete"], b["note"]) == ("b", 2, False, None)
    assert a["bytes"] == a["own_bytes"] + a["shared_bytes"]
    assert result["type"] == "result"
    assert (result["ok"], result["agents"], result["blocks"]) == (True, 2, 4)
    assert result["bytes"] == a["bytes"] + b["bytes"]


def test_bytes_are_those_on_disk(amem: Amem, store: Store) -> None:
    [agent, _] = lines(amem("inspect", "--json"))
    state = store.resolve(Ref("a"))
    paths = [store.layout.object(state.manifest.domain, BLOCK, row.sha256) for row in store.blocks(state.manifest)]
    paths += [store.layout.object(state.manifest.domain, PAGE, row.sha256) for row in state.manifest.pages]
    assert state.manifest.tail
    paths.append(store.layout.object(state.manifest.domain, TAIL, state.manifest.tail.sha256))
    paths.append(store.layout.object(state.manifest.domain, MANIFEST, state.digest))
    assert agent["bytes"] == sum(path.stat().st_size for path in paths)


@pytest.mark.usefixtures("store")
def test_inspect_shows_one_state(amem: Amem) -> None:
    amem("snapshot", "a~1", "s", "--note", "early")
    agent, result = lines(amem("inspect", "--json", "a@s"))
    assert (agent["name"], agent["snapshots"]) == ("a", 1)
    assert (result["ref"], result["tokens"], result["cached"], result["pending"]) == ("a@s", 300, 299, 1)
    assert result["fp16_bytes"] == 299 * 2 * len(GROUP.layers) * 2 * 64
    twice = 64 / 299  # the first 64 tokens have two layers of codes
    assert result["cache_bytes"] * 16 == pytest.approx(result["fp16_bytes"] * 4.5 * (1 + twice), rel=0.01)
    assert [point["tokens"] for point in result["resume_points"]] == [700, 300]
    text = amem("inspect", "a@s").stdout
    assert "a@s" in text
    assert "early" in text
    assert "full-0: 2 layers" in text


def test_inspect_finds_a_state_by_its_digest(amem: Amem, store: Store) -> None:
    _, result = lines(amem("inspect", "--json", f"sha256:{head(store)[:10]}"))
    assert result["state"] == f"sha256:{head(store)}"
    assert amem("inspect", "sha256:" + "0" * 20).returncode == 4


@pytest.mark.usefixtures("store")
def test_inspect_in_a_pipe_is_aligned_text(amem: Amem) -> None:
    header, row = amem("inspect").stdout.splitlines()
    assert header.split()[:3] == ["AGENT", "MODEL", "TOKENS"]
    assert row.split()[:3] == ["a", "tiny", "700"]
    assert header.index("TOKENS") + len("TOKENS") == row.index("700") + 3


def test_inspect_of_an_empty_store_is_fine(amem: Amem, tmp_path: Path) -> None:
    assert amem("inspect").returncode == 10
    assert not (tmp_path / "store").exists()
    Store.open_or_create(tmp_path / "store", ACTOR)
    done = amem("inspect", "--json")
    assert (done.returncode, lines(done)[-1]["agents"]) == (0, 0)


@pytest.mark.usefixtures("store")
def test_inspect_writes_nothing(amem: Amem, tmp_path: Path) -> None:
    before = files_below(tmp_path)
    for arguments in ((), ("a",), ("a~1",), ("--json",)):
        assert amem("inspect", *arguments).returncode == 0
    assert files_below(tmp_path) == before


def test_inspect_survives_a_damaged_journal(amem: Amem, store: Store) -> None:
    store.layout.journal.write_bytes(b"not a line\n" + store.layout.journal.read_bytes())
    assert amem("inspect").returncode == 0


def test_a_damaged_manifest_is_exit_8(amem: Amem, store: Store) -> None:
    path = store.layout.object(store.agent("a").domain, MANIFEST, head(store))
    path.write_bytes(path.read_bytes().replace(b"700", b"701"))
    done = amem("--json", "inspect", "a")
    assert (done.returncode, lines(done)[-1]["code"]) == (8, "damage")


def test_an_unknown_agent_is_exit_4_with_close_names(amem: Amem, store: Store) -> None:
    put_state(store, "planner", range(10))
    done = amem("fork", "planer", "x")
    assert done.returncode == 4
    assert "planner" in done.stderr
    assert amem("chat", "planer", "hello").returncode == 4
    assert amem("restore", "a@none").returncode == 4
    assert amem("inspect", "a~9").returncode == 4


def test_the_journal_says_who_did_it(amem: Amem, store: Store) -> None:
    amem("snapshot", "a", "s", env={"AMEM_ACTOR": "planner"})
    last = store.layout.journal.read_text().splitlines()[-1]
    assert '"claimed":"planner"' in last
    assert '"via":"snapshot"' in last
