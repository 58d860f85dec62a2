"""verify finds every kind of damage, names the agents affected, and finds nothing on a healthy store, however busy."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from kvstore.format.kinds import OBJECT_KINDS, TAIL
from kvstore.gc.collect import Policy
from kvstore.gc.collect import collect as collect_garbage
from kvstore.lifecycle import fork, restore
from kvstore.naming import parse_ref
from kvstore.remove.remove import remove
from kvstore.store import Store
from kvstore.verify.checks import Checks
from kvstore.verify.verify import sums, verify
from tests.support.damaging import DEEP, KINDS, QUICK, A, B, damage, flip, found, only, path_of
from tests.support.making import ACTOR, commit, journal


@pytest.mark.parametrize("depth", ["quick", "checksums", "deep"])
def test_a_healthy_store(full: Store, depth: str) -> None:
    restore(full, parse_ref("a@s"), wait=0)
    commit(full, "d", A)
    remove(full, parse_ref("d"), wait=0)
    collect_garbage(full, Policy(keep_history=0, older_than=0))
    commit(full, "c", [*B, 1])
    report = verify(full, Checks(depth))  # type: ignore[arg-type]
    assert report.findings == ()
    files = list(full.layout.domains.glob("*/*/*/*"))
    assert (report.checked, report.bytes) == (len(files), sum(path.stat().st_size for path in files))
    lines = sorted(f"{path.parts[-4]}/{path.parts[-3]}/{path.stem}\n" for path in files)
    assert report.objects_digest == hashlib.sha256("".join(lines).encode()).hexdigest()
    assert report.store_id == full.id
    assert report.started < report.finished
    assert report.journal_head == journal(full.layout.root)[-1].digest
    assert report.proven
    assert report.not_proven


def test_it_writes_nothing_and_takes_no_lock(full: Store, steps: list[str]) -> None:
    with full.hold("a", wait=0):
        del steps[:]
        assert found(full) == []
    assert steps == []


def test_every_object_kind_is_damaged() -> None:
    assert set(KINDS) == {kind.folder for kind in OBJECT_KINDS}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", [0, 9, None, -1])
def test_a_flipped_bit(full: Store, kind: str, place: int | None) -> None:
    path = path_of(full, kind)
    damage(path, lambda data: flip(data, place))
    for checks in (Checks(), DEEP):
        finding = only(full, checks)
        assert (finding.severity, finding.kind, finding.object) == ("damage", "altered", f"sha256:{path.stem}")
        assert "a" in finding.agents
        assert "c" not in finding.agents


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keep", [0, 100])
@pytest.mark.parametrize("checks", [QUICK, Checks(), DEEP], ids=["quick", "default", "deep"])
def test_a_truncated_and_an_empty_file(full: Store, kind: str, keep: int, checks: Checks) -> None:
    damage(path_of(full, kind), lambda data: data[:keep])
    finding = only(full, checks)
    assert (finding.severity, "a" in finding.agents) == ("damage", True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checks", [QUICK, Checks(), DEEP], ids=["quick", "default", "deep"])
def test_a_missing_file(full: Store, kind: str, checks: Checks) -> None:
    path = path_of(full, kind)
    path.unlink()
    finding = only(full, checks)
    assert (finding.kind, finding.object) == ("missing", f"sha256:{path.stem}")
    # a fork lives on without the state that it took over, which gc may have collected
    assert finding.agents == (("a",) if kind == "manifests" else ("a", "b"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checks", [QUICK, Checks(), DEEP], ids=["quick", "default", "deep"])
def test_no_regular_file_in_its_place(full: Store, tmp_path: Path, kind: str, checks: Checks) -> None:
    path = path_of(full, kind)
    shutil.copy(path, tmp_path / "copy")
    for is_fifo in (True, False):
        path.unlink()
        if is_fifo:
            os.mkfifo(path, 0o600)
        else:
            path.symlink_to(tmp_path / "copy")
        findings = found(full, checks)
        assert {finding.severity for finding in findings} == {"damage"}
        assert {name for finding in findings for name in finding.agents} >= {"a"}
        assert "foreign" in {finding.kind for finding in findings}


def test_every_bit_of_a_ref_counts(full: Store) -> None:
    for path in (full.layout.agent_ref("c"), full.layout.snapshot_ref("a", "s")):
        whole = path.read_bytes()
        for place in range(0, len(whole), 7):
            path.write_bytes(flip(whole, place))
            findings = found(full, Checks())
            assert findings, whole[place - 9 : place + 9]
            assert {name for finding in findings for name in finding.agents}
        path.write_bytes(whole)
    assert found(full) == []


def test_a_ref_that_leads_to_another_agents_state(full: Store) -> None:
    path = full.layout.agent_ref("b")
    a, b = full.agent("a"), full.agent("b")
    path.write_bytes(path.read_bytes().replace(b.manifest.encode(), a.manifest.encode()))
    assert {(f.kind, f.agents) for f in found(full)} == {("ref", ("b",)), ("journal", ("b",))}


def test_a_ref_that_has_gone(full: Store) -> None:
    full.layout.agent_ref("b").unlink()
    finding = only(full)
    assert (finding.kind, "has no ref" in finding.message) == ("journal", True)


def test_foreign_files(full: Store) -> None:
    domain = full.layout.domain(full.agent("a").domain)
    for path in (full.layout.root / "x", full.layout.domains / "y", domain / "z", domain / "blocks" / "00" / "w"):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.write_bytes(b"mine")
        path.chmod(0o600)
    for checks in (QUICK, Checks()):
        assert [finding.kind for finding in found(full, checks)] == ["foreign"] * 4


def test_a_damaged_file_that_nobody_needs(full: Store) -> None:
    commit(full, "d", [9, *B])
    path = path_of(full, "blocks", "d")
    remove(full, parse_ref("d"), wait=0)
    damage(path, flip)
    finding = only(full, Checks())
    assert (finding.object, finding.agents) == (f"sha256:{path.stem}", ())


def test_a_missing_domain(full: Store) -> None:
    full.layout.domain_file(full.agent("a").domain).unlink()
    finding = only(full)
    assert (finding.kind, finding.agents) == ("missing", ("a", "b"))
    assert "domain.json" in finding.message


# --- reports


def test_what_is_proven_depends_on_what_was_read(full: Store) -> None:
    def claims(checks: Checks) -> tuple[set[str], set[str]]:
        report = verify(full, checks)
        return set(report.proven), set(report.not_proven)

    levels = [claims(checks) for checks in (QUICK, Checks(), DEEP)]
    assert levels[0][0] < levels[1][0] < levels[2][0]
    assert any("not read" in sentence for sentence in levels[0][1])
    assert any("forged" in sentence for sentence in levels[1][1])
    assert not any("forged" in sentence for sentence in levels[2][1])
    path_of(full, "blocks").unlink()
    proven, not_proven = claims(DEEP)
    assert any("exist and have their sizes" in sentence for sentence in not_proven - proven)
    assert any("journal" in sentence for sentence in proven)


def test_only_the_agents_that_were_named(full: Store) -> None:
    path_of(full, "blocks").unlink()
    assert found(full, Checks(agents=("c",), journal=False)) == []
    assert only(full, Checks(agents=("b",), journal=False)).agents == ("a", "b")


def test_it_goes_on_after_the_first_fault(full: Store) -> None:
    for path in [path_of(full, kind, "c") for kind in ("pages", "tails", "blocks")]:
        damage(path, flip)
    damage(path_of(full, "manifests"), flip)
    assert len(found(full)) == 4
    assert {name for finding in found(full) for name in finding.agents} == {"a", "b", "c"}


def test_the_sums_are_what_sha256sum_takes(full: Store, tmp_path: Path) -> None:
    listed = tmp_path / "sums"
    listed.write_text("".join(sums(full.layout)))
    command = ["sha256sum", "--check", "--strict", "--quiet", str(listed)]
    assert subprocess.run(command, cwd=full.layout.root).returncode == 0
    assert len(listed.read_text().splitlines()) == verify(full, DEEP).checked
    damage(path_of(full, "tails"), flip)
    assert subprocess.run(command, cwd=full.layout.root, capture_output=True).returncode == 1


@pytest.mark.skipif(os.getuid() != 0, reason="needs the right to mount")
def test_on_a_read_only_mount(full: Store, tmp_path: Path) -> None:
    mount = tmp_path / "mounted"
    mount.mkdir()
    bind = ["mount", "--bind", "-o", "ro", str(full.layout.root), str(mount)]
    if subprocess.run(bind).returncode:
        pytest.skip("needs the right to mount")
    try:
        with pytest.raises(OSError, match="Read-only"):
            (mount / "x").touch()
        assert found(Store.open(mount, ACTOR)) == []
    finally:
        subprocess.run(["umount", str(mount)], check=True)


# --- beside writers


def test_a_forks_name_does_not_hide_its_source(store: Store) -> None:
    commit(store, "m", A[:300])
    commit(store, "m", A)
    fork(store, parse_ref("m"), "a")  # which is looked at first
    store.layout.object(store.agent("m").domain, TAIL, store.resolve(parse_ref("m~1")).manifest.tail.sha256).unlink()  # type: ignore[union-attr]
    assert only(store).agents == ("m",)
