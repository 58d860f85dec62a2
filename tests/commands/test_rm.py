"""`rm` on real stores."""

import json
from pathlib import Path

import pytest

from kvstore.format.kinds import MANIFEST
from kvstore.lifecycle import fork, snapshot
from kvstore.naming import Ref
from kvstore.remove.certificate import check_erased, read_certificates
from kvstore.store import Store
from tests.commands.conftest import put_state
from tests.support.running.amem import Amem, lines


def names(store: Store) -> list[str]:
    return [agent.name for agent in store.agents()]


def test_rm_leaves_the_bytes_to_gc(amem: Amem, store: Store) -> None:
    snapshot(store, Ref("a"), "s")
    done = amem("rm", "a", "--json")
    *objects, result = lines(done)
    assert done.returncode == 0
    assert names(store) == []
    assert [" ".join(line) for line in objects] == ["type kind name action reason held_by bytes dry_run"] * len(objects)
    assert {line["action"] for line in objects} == {"removed", "left"}
    assert (result["freed_bytes"], result["removed"], result["certificates"]) == (0, ["a"], [])
    assert result["left_bytes"] > 0
    assert amem("rm", "a").returncode == 4


def test_erase_prints_a_certificate(amem: Amem, store: Store) -> None:
    done = amem("rm", "a", "--erase")
    assert done.returncode == 0
    [certificate] = read_certificates(done.stdout.encode())
    assert check_erased(store, certificate) == []
    assert "erased" in done.stderr
    assert list(store.layout.domains.iterdir()) == []


def test_an_erasure_in_part_is_exit_3_and_says_who_holds_the_rest(amem: Amem, store: Store) -> None:
    fork(store, Ref("a", back=1), "b")
    before = sorted(store.layout.root.rglob("*"))
    planned = amem("rm", "a", "--erase", "--dry-run", "--json")
    assert planned.returncode == 0
    assert sorted(store.layout.root.rglob("*")) == before
    done = amem("rm", "a", "--erase", "--json")
    *objects, result = lines(done)
    assert (done.returncode, result["ok"]) == (3, False)
    kept = [line for line in objects if line["action"] == "kept"]
    assert kept and all(line["held_by"] == ["b"] and line["reason"] for line in kept)
    assert result["kept_objects"] == len(kept)
    assert [{**line, "dry_run": False} for line in lines(planned)[:-1]] == objects
    assert read_certificates(json.dumps(result).encode())[0].remaining


def test_what_a_later_ref_takes_has_not_stayed(amem: Amem, store: Store) -> None:
    fork(store, Ref("a", back=1), "b")
    done = amem("rm", "a", "b", "--erase", "--json")
    assert (done.returncode, lines(done)[-1]["kept_objects"]) == (0, 0)
    assert list(store.layout.domains.iterdir()) == []
    assert len(lines(done)[-1]["certificates"]) == 2


def test_rm_of_many_goes_on(amem: Amem, store: Store) -> None:
    for name in "bcd":
        put_state(store, name, range(300))
    with store.hold("c", 0):
        done = amem("rm", "a", "nobody", "c", "d", "--wait", "0", "--json")
    assert (done.returncode, names(store)) == (3, ["b", "c"])
    result = lines(done)[-1]
    assert (result["ok"], result["removed"], result["failed"]) == (False, ["a", "d"], 2)
    assert [line["code"] for line in lines(done) if line["type"] == "failed"] == ["not-found", "busy"]
    assert "nobody was not removed" in done.stderr


def test_rm_of_a_domain(amem: Amem, store: Store) -> None:
    store.create_domain("team")
    assert amem("rm", "--domain", "team").returncode == 0
    assert amem("rm", "--domain", "team").returncode == 4
    assert amem("rm", "--domain", store.agent("a").domain, "--erase").returncode == 0
    assert names(store) == []


def test_a_damaged_neighbour_stops_an_erasure(amem: Amem, store: Store) -> None:
    other = fork(store, Ref("a"), "b")
    store.layout.object(other.agent.domain, MANIFEST, other.digest).write_bytes(b"")
    put_state(store, "c", range(300))
    assert amem("rm", "a", "--erase").returncode == 8
    assert amem("rm", "a", "c", "--erase").returncode == 8  # before done in part
    assert names(store) == ["a", "b"]


@pytest.mark.parametrize("arguments", [(), ("a", "--domain", "d"), ("a~1",), ("a", "--wait", "-1"), ("../a",)])
@pytest.mark.usefixtures("store")
def test_what_makes_no_sense_is_refused(amem: Amem, arguments: tuple[str, ...]) -> None:
    assert amem("rm", *arguments).returncode == 2


def test_rm_without_a_store(amem: Amem, tmp_path: Path) -> None:
    assert amem("rm", "a").returncode == 10
    assert not (tmp_path / "store").exists()
