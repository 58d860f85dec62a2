"""verify --isolation: nothing of one domain, and nothing of one user, within another's reach."""

import os
import shutil
from pathlib import Path

import pytest

from kvstore.commit.index import Index
from kvstore.naming import parse_ref
from kvstore.store import Store
from kvstore.verify.checks import Checks
from kvstore.verify.verify import verify
from tests.support.damaging import DEEP, KINDS, damage, fill, found, only, path_of

ISOLATION = Checks(None, journal=False)


@pytest.fixture
def full(store: Store) -> Store:
    return fill(store)


def moved(store: Store, kind: str) -> Path:
    """A file of `a`'s, copied into the domain of `c`."""
    path = path_of(store, kind)
    there = store.layout.domain(store.agent("c").domain) / kind / path.parent.name / path.name
    there.parent.mkdir(mode=0o700, exist_ok=True)
    shutil.copy(path, there)
    return there


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checks", [ISOLATION, Checks(), DEEP], ids=["isolation", "default", "deep"])
def test_a_file_under_the_wrong_domain(full: Store, kind: str, checks: Checks) -> None:
    moved(full, kind)
    report = verify(full, checks)
    assert report.breached
    assert {(finding.severity, finding.kind) for finding in report.findings} == {("breach", "boundary")}
    path_of(full, kind).unlink()  # moved rather than copied
    assert verify(full, checks).breached


def test_a_block_of_another_domain_in_the_place_of_ones_own(full: Store) -> None:
    damage(path_of(full, "blocks", "c"), lambda _: path_of(full, "blocks").read_bytes())
    for checks in (ISOLATION, Checks(), DEEP):
        finding = next(finding for finding in found(full, checks) if finding.severity == "breach")
        assert finding.agents == ("c",)


def test_equal_salts(full: Store) -> None:
    a, c = (full.domain(full.agent(name).domain) for name in "ac")
    damage(full.layout.domain_file(c.id), lambda data: data.replace(c.salt.encode(), a.salt.encode()))
    assert any("the same salt" in finding.message for finding in found(full, ISOLATION))


def test_a_row_of_the_index_that_leads_across(full: Store) -> None:
    row = full.blocks(full.resolve(parse_ref("a")).manifest)[0]
    Index(full.layout).add(full.agent("c").domain, [row])
    assert (only(full).severity, only(full).kind) == ("breach", "index")


def test_a_staged_file_of_another_domain(full: Store) -> None:
    with full.transaction(full.domain(full.agent("c").domain)):
        [folder] = [path for path in full.layout.staging.iterdir() if path.is_dir()]
        path = path_of(full, "blocks")
        staged = folder / path.stem
        shutil.copy(path, staged)
        assert only(full, ISOLATION).kind == "boundary"


@pytest.mark.parametrize(("mode", "severity"), [(0o644, "breach"), (0o440, "breach"), (0o200, "damage")])
@pytest.mark.parametrize("what", ["blocks", "manifests", "journal", "ref"])
def test_a_wrong_mode(full: Store, what: str, mode: int, severity: str) -> None:
    known = {"journal": full.layout.journal, "ref": full.layout.agent_ref("a")}
    path = known.get(what) or path_of(full, what)
    path.chmod(mode)
    finding = only(full)
    assert (finding.severity, finding.kind, finding.object) == (
        severity,
        "mode",
        str(path.relative_to(full.layout.root)),
    )


def test_an_open_folder_a_second_link_and_a_strange_owner(full: Store, tmp_path: Path) -> None:
    path = path_of(full, "blocks")
    path.parent.chmod(0o755)
    assert (only(full).severity, only(full).kind) == ("breach", "mode")
    path.parent.chmod(0o700)
    (tmp_path / "link").hardlink_to(path)
    assert (only(full).severity, only(full).kind) == ("breach", "link")
    (tmp_path / "link").unlink()
    if os.getuid() == 0:
        os.chown(path, 12345, -1)
        assert (only(full).severity, only(full).kind) == ("breach", "owner")
