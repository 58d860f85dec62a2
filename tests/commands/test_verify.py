"""`amem verify`, run for real."""

from pathlib import Path

import pytest

from kvstore.format.kinds import BLOCK
from kvstore.naming import parse_ref
from kvstore.store import Store
from tests.support.making import commit
from tests.support.running import children
from tests.support.running.amem import Amem, lines

LEVELS: tuple[list[str], ...] = (
    [],
    ["--quick"],
    ["--deep"],
    ["--isolation"],
    ["--journal"],
    ["--deep", "--isolation", "--journal"],
)


@pytest.fixture
def store(store: Store) -> Store:
    """Beside `a`, the agent `b`."""
    commit(store, "b", range(700))
    return store


def block(store: Store, agent: str) -> Path:
    state = store.resolve(parse_ref(agent))
    return store.layout.object(state.agent.domain, BLOCK, store.blocks(state.manifest)[0].sha256)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)
    path.chmod(0o400)


@pytest.mark.parametrize("level", LEVELS, ids=" ".join)
def test_a_healthy_store(amem: Amem, store: Store, level: list[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in store.layout.root.rglob("*")}
    done = amem("--json", "verify", *level)
    [result] = lines(done)
    assert (done.returncode, result["ok"], result["findings"]) == (0, True, 0)
    assert result["store_id"] == store.id
    assert result["objects_digest"].startswith("sha256:")
    assert result["proven"]
    assert result["not_proven"]
    assert result["started"] < result["finished"]
    assert (result["checked"] > 0) == bool({"--quick", "--deep", "--isolation"} & {*level} or not level)
    assert {path: path.stat().st_mtime_ns for path in store.layout.root.rglob("*")} == before


def test_damage_is_exit_8_and_names_whom_it_hurts(amem: Amem, store: Store) -> None:
    flip(block(store, "b"))
    assert amem("verify", "--quick").returncode == 0
    done = amem("--json", "verify")
    finding, result = lines(done)
    assert (done.returncode, result["ok"], result["findings"]) == (8, False, 1)
    assert finding["type"] == "finding"
    assert (finding["severity"], finding["kind"], finding["agents"]) == ("damage", "altered", ["b"])
    assert finding["object"] == f"sha256:{block(store, 'b').stem}"
    text = amem("verify")
    assert "affects b" in text.stdout
    assert "amem repair b" in text.stderr
    assert amem("verify", "a").returncode == 0
    assert amem("verify", "b").returncode == 8
    assert amem("verify", "nobody").returncode == 4


def test_isolation_comes_before_damage(amem: Amem, store: Store) -> None:
    flip(block(store, "b"))
    path = block(store, "a")
    path.chmod(0o644)
    done = amem("--json", "verify")
    first, second, _ = lines(done)
    assert (done.returncode, first["severity"], second["severity"]) == (9, "breach", "damage")
    assert amem("verify", "--isolation").returncode == 9
    assert "do not use this store" in amem("verify").stderr


def test_a_journal_head_proves_that_nothing_was_cut_off(amem: Amem, store: Store) -> None:
    head = lines(amem("--json", "verify", "--journal"))[-1]["journal_head"]
    assert amem("verify", "--journal", "--journal-head", head).returncode == 0
    done = amem("verify", "--journal-head", "sha256:" + "0" * 64)
    assert done.returncode == 8
    assert "cut off" in done.stdout
    assert amem("verify", "--journal-head", "head").returncode == 2
    journal = store.layout.journal
    journal.write_bytes(journal.read_bytes().replace(b'"op":"prefill"', b'"op":"prefilt"', 1))
    assert amem("verify", "--journal").returncode == 8
    assert amem("verify", "--isolation").returncode == 0


def test_sums(amem: Amem, store: Store, tmp_path: Path) -> None:
    done = amem("verify", "--deep", "--sums", "-")
    assert done.returncode == 0
    assert amem("verify", "--deep", "--sums", "sums").returncode == 0
    assert (tmp_path / "sums").read_text() == done.stdout
    check = ("sha256sum", "--check", "--strict", "--quiet", tmp_path / "sums")
    assert children.run(*check, cwd=store.layout.root).returncode == 0
    assert amem("--json", "verify", "--deep", "--sums", "-").returncode == 2
    assert amem("verify", "--sums", "-").returncode == 2
    assert amem("verify", "--deep", "--quick").returncode == 2


def test_an_erasure_can_be_checked_again(amem: Amem, store: Store, tmp_path: Path) -> None:
    kept = block(store, "b").read_bytes()
    path = block(store, "b")
    (tmp_path / "certificate").write_text(amem("rm", "b", "--erase").stdout)
    done = amem("--json", "verify", "--erased", "certificate")
    [result] = lines(done)
    assert (done.returncode, result["findings"], result["checked"] > 0) == (0, 0, True)
    path.parent.mkdir(parents=True)
    path.write_bytes(kept)
    *findings, result = lines(amem("--json", "verify", "--erased", "certificate"))
    assert ({finding["kind"] for finding in findings}, result["ok"]) == ({"erased"}, False)
    assert amem("verify", "--erased", "certificate").returncode == 8
    assert amem("verify", "--erased", "nothing").returncode == 1


def test_no_store_is_exit_10(amem: Amem) -> None:
    assert amem("verify").returncode == 10
