"""`amem gc`, run for real."""

import errno
import os
from pathlib import Path

import pytest

from amem_cli.shell.quantities import parse_age, parse_size
from kvstore.errors import UsageError
from kvstore.store import Store
from tests.support.making import commit
from tests.support.running.amem import Amem, lines

A = range(700)


@pytest.fixture
def store(store: Store) -> Store:
    """Beside `a`, the agent `b`: three states, the last of other tokens."""
    for tokens in (A[:300], A, range(5000, 5700)):
        commit(store, "b", tokens)
    return store


def disk(store: Store) -> int:
    return sum(path.stat().st_size for path in store.layout.domains.rglob("*") if path.is_file())


def test_it_says_what_went(amem: Amem, store: Store) -> None:
    before = disk(store)
    planned = amem("--json", "gc", "--dry-run", "--keep-history", "0")
    assert disk(store) == before
    done = amem("--json", "gc", "--keep-history", "0")
    *objects, result = lines(done)
    assert (done.returncode, result["ok"], result["dry_run"]) == (0, True, False)
    assert result["freed_bytes"] == before - disk(store) == sum(line["bytes"] for line in objects) > 0
    assert result["freed_objects"] == len(objects)
    assert {"type", "action", "reason", "kind", "digest", "agents", "held_by", "bytes"} <= objects[0].keys()
    assert {tuple(line["agents"]) for line in objects} == {("a",), ("b",)}
    assert all(line["digest"].startswith("sha256:") for line in objects)
    *would, plan = lines(planned)
    assert sorted(line["digest"] for line in would) == sorted(line["digest"] for line in objects)
    assert (plan["freed_bytes"], plan["dry_run"]) == (result["freed_bytes"], True)
    assert store.layout.journal.read_text().splitlines()[-1].count('"op":"gc"') == 1


def test_text_names_agents(amem: Amem, store: Store) -> None:
    assert disk(store)
    done = amem("gc", "--dry-run", "--keep-history", "0")
    assert done.returncode == 0
    header, first, second = done.stdout.splitlines()
    assert header.split() == ["AGENTS", "WHAT", "FILES", "SIZE"]
    assert (first.split()[0], second.split()[0]) == ("a", "b")
    assert "would be freed" in done.stderr


def test_by_default_ten_states_stay(amem: Amem, store: Store) -> None:
    [result] = lines(amem("--json", "gc"))
    assert result["freed_objects"] == 0
    for number in range(10):
        commit(store, "b", [number])
    *objects, result = lines(amem("--json", "gc"))
    assert {line["reason"] for line in objects} == {"history"}
    assert [line["kind"] for line in objects].count("manifest") == 2


def test_max_bytes_evicts(amem: Amem, store: Store) -> None:
    amem("snapshot", "a", "s")
    assert disk(store) < 900_000
    assert lines(amem("--json", "gc", "--max-bytes", "900kB"))[-1]["evicted"] == []
    done = amem("--json", "gc", "--max-bytes", "10k")
    *objects, result = lines(done)
    assert (done.returncode, result["ok"]) == (3, False)  # the snapshot's blocks stay
    assert result["evicted"] == ["b"]
    assert result["over_limit_bytes"] == result["kept_bytes"] - 10_000
    [evicted] = [line for line in objects if line["action"] == "evicted"]
    assert (evicted["kind"], evicted["name"], evicted["agents"]) == ("agent", "b", ["b"])


def test_older_than_evicts(amem: Amem, store: Store) -> None:
    assert disk(store)
    assert lines(amem("--json", "gc", "--older-than", "1h"))[-1]["evicted"] == []
    assert lines(amem("--json", "gc", "--older-than", "0s"))[-1]["evicted"] == ["a", "b"]
    assert "agent" not in amem("gc", "--older-than", "0s").stderr  # there is nothing left to evict


def test_damage_stops_it(amem: Amem, store: Store) -> None:
    next(store.layout.domain(store.agent("b").domain).glob("tails/*/*")).unlink()
    before = disk(store)
    done = amem("--json", "gc", "--keep-history", "9")
    assert (done.returncode, lines(done)[-1]["code"]) == (8, "damage")
    assert "b needs it" in done.stderr
    assert "amem repair b" in done.stderr
    assert disk(store) == before


def test_what_cannot_be_deleted_is_exit_3(amem_process: Amem, store: Store, tmp_path: Path) -> None:
    blocker = tmp_path / "sitecustomize.py"
    blocker.write_text(
        "from kvstore.disk import files\n"
        "def refuse(step, path):\n"
        f"    if step == 'unlink' and 'blocks' in path.parts: raise OSError({errno.EIO}, 'bad sector', str(path))\n"
        "files.fault = refuse\n"
    )
    assert disk(store)
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])}
    done = amem_process("--json", "gc", "--keep-history", "0", env=environment)
    *objects, result = lines(done)
    assert (done.returncode, result["ok"]) == (3, False)
    failed = [line for line in objects if line["action"] == "failed"]
    assert {line["kind"] for line in failed} == {"block"}
    assert result["failed"] == len(failed) > 0
    assert "could not be deleted" in done.stderr


def test_a_foreign_file_is_told(amem: Amem, store: Store) -> None:
    (store.layout.root / "notes").write_text("mine")
    done = amem("gc")
    assert done.returncode == 0
    assert "notes does not belong to the store; left in place" in done.stderr


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("500", 500), ("20G", 20 * 10**9), ("1.5 GiB", 3 << 29), ("4ki", 4096), ("7MB", 7 * 10**6)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(("text", "age"), [("45m", 2700), ("12h", 43200), ("30d", 2_592_000), ("2w", 1_209_600)])
def test_ages(text: str, age: int) -> None:
    assert parse_age(text) == age


@pytest.mark.parametrize("text", ["", "-1", "1e3", "G", "3 X", "1_000", "١"])
def test_no_sizes(amem: Amem, text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        parse_size(text)
    if text:
        assert amem("gc", f"--max-bytes={text}").returncode == 2


def test_an_age_needs_a_unit(amem: Amem) -> None:
    assert amem("gc", "--older-than", "30").returncode == 2


def test_no_store_is_exit_10(amem: Amem) -> None:
    assert amem("gc").returncode == 10
