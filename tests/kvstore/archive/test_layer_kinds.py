"""Agents of every layer kind travel through an archive, into their own domain and into another one."""

from pathlib import Path

import pytest

from kvstore.format.document import as_dict
from kvstore.naming import Ref
from kvstore.store import Store
from kvstore.verify.checks import Checks
from kvstore.verify.verify import verify
from tests.support import recording
from tests.support.archives import exported, imported
from tests.support.making import ACTOR

ARCHIVE = Path(__file__).parents[2] / "data" / "store-0.1.0.tar.xz"


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store with agents of every layer kind. It is only read."""
    return Store.open(recording.unpack(ARCHIVE, tmp_path_factory.mktemp("old")), ACTOR)


def test_the_store_has_every_kind_of_0_1_0(old: Store) -> None:
    manifests = [old.resolve(Ref(agent.name)).manifest for agent in old.agents()]
    assert {group.kind for manifest in manifests for group in manifest.groups} == {"full", "window", "recurrent"}
    assert any(group.latent for manifest in manifests for group in manifest.groups)


@pytest.mark.parametrize("domain", [None, "another"])
def test_all_of_them_arrive(old: Store, tmp_path: Path, domain: str | None) -> None:
    new = Store.open_or_create(tmp_path / "new", ACTOR)
    for agent in old.agents():
        imported(new, exported(old, agent.name, lineage=True), domain=domain)
        before, after = (store.resolve(Ref(agent.name)).manifest for store in (old, new))
        assert new.tokens(after).tolist() == old.tokens(before).tolist()
        assert [as_dict(group) for group in after.groups] == [as_dict(group) for group in before.groups]
        assert (after.cached, after.feeds, after.turns) == (before.cached, before.feeds, before.turns)
    assert [agent.name for agent in new.agents()] == [agent.name for agent in old.agents()]
    report = verify(new, Checks(depth="deep"))
    assert report.findings == ()
    assert report.checked > len(new.agents())
