"""A field that names files is followed by all who must: gc, verify, export, erasure, commits, usage and look-ups."""

import json
from collections.abc import Iterator
from typing import get_type_hints

import pytest

from amem_cli.views.disk_usage import Usage
from kvstore.archive.export import exporting
from kvstore.errors import DamageError
from kvstore.format import references
from kvstore.format.block import TailHeader
from kvstore.format.kinds import BLOCK, OBJECT_KINDS, PAGE, TAIL, StoredObject
from kvstore.format.manifest import BlockRow, FileRow, Manifest, Page
from kvstore.format.parts import Part
from kvstore.format.references import OBJECT_REFERENCES, STATE_LINKS, STATE_REFERENCES, StateReference, named_by
from kvstore.gc.collect import Policy, collect
from kvstore.graph.walk import affected_agents
from kvstore.naming import Ref, new_id
from kvstore.remove.remove import remove
from kvstore.store import Store
from kvstore.verify.checks import Checks
from kvstore.verify.verify import verify
from tests.support.making import CODEC, MODEL, commit, put_state

PARTS = (Part("made-up", "I32", (8,)),)


class Planted:
    """A reference that no version has: each of the agent's states names one more tail."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.rows: dict[int, FileRow] = {}  # by the number of a state's tokens
        self.reference = StateReference("planted", TAIL, lambda manifest: self._of(manifest))
        self.domain = store.create_domain("shared")
        self.agent_id = new_id()
        commit(store, "other", range(9000, 9400), self.domain)

    def _of(self, manifest: Manifest) -> list[FileRow]:
        mine = manifest.agent == self.agent_id and manifest.tokens in self.rows
        return [self.rows[manifest.tokens]] if mine else []

    def commit(self, tokens: int) -> StoredObject:
        """One more state of the agent `a`, and the tail that it names."""
        with self.store.hold("a", 1) as hold:
            before = hold.agent.manifest if hold.agent else None
            with self.store.transaction(self.domain) as txn:
                head = TailHeader(self.domain.id, self.domain.salt, CODEC.name, MODEL.fingerprint, 0, tokens)
                self.rows[tokens] = txn.put_tail(head, [bytes(32)], PARTS)
                txn.commit(hold, put_state(txn, self.agent_id, before, range(tokens)), before)
        return StoredObject(TAIL, self.rows[tokens].sha256)

    def exists(self, found: StoredObject) -> bool:
        return self.store.layout.object(self.domain.id, *found).is_file()


@pytest.fixture
def planted(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Planted]:
    made = Planted(store)
    monkeypatch.setattr(references, "STATE_REFERENCES", (*STATE_REFERENCES, made.reference))
    yield made
    monkeypatch.undo()


def test_gc_keeps_what_a_reference_names(planted: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    older, newer = planted.commit(300), planted.commit(301)
    collect(planted.store, Policy(keep_history=1))
    assert planted.exists(older)
    assert planted.exists(newer)
    collect(planted.store, Policy(keep_history=0))
    assert not planted.exists(older)
    assert planted.exists(newer)
    monkeypatch.setattr(references, "STATE_REFERENCES", STATE_REFERENCES)
    collect(planted.store, Policy(keep_history=0))
    assert not planted.exists(newer)


def test_verify_misses_it_and_names_its_agent(planted: Planted) -> None:
    found = planted.commit(300)
    assert not verify(planted.store, Checks()).findings
    planted.store.layout.object(planted.domain.id, *found).unlink()
    [finding] = verify(planted.store, Checks(depth="quick")).findings
    assert (finding.kind, finding.object, finding.agents) == ("missing", f"sha256:{found.sha256}", ("a",))


def test_verify_reads_it(planted: Planted) -> None:
    path = planted.store.layout.object(planted.domain.id, *planted.commit(300))
    data = path.read_bytes()
    path.write_bytes(data[:-1] + b"x")
    [finding] = verify(planted.store, Checks(isolation=False)).findings
    assert (finding.kind, finding.agents) == ("altered", ("a",))


def test_export_takes_it(planted: Planted) -> None:
    older, newer = planted.commit(300), planted.commit(301)
    with exporting(planted.store, Ref("a")) as export:
        assert newer in dict(export.contents.files)
        assert older not in dict(export.contents.files)
    with exporting(planted.store, Ref("a"), lineage=True) as export:
        assert {older, newer} <= dict(export.contents.files).keys()


def test_an_erasure_takes_it(planted: Planted) -> None:
    found = planted.commit(300)
    done = remove(planted.store, Ref("a"), 1, erase=True)
    assert not planted.exists(found)
    assert done.certificate is not None
    assert str(found) in done.certificate.erased


def test_a_commit_checks_it(planted: Planted) -> None:
    planted.rows[300] = FileRow("0" * 64, "0" * 16, 10, 3)
    with (
        planted.store.hold("a", 1) as hold,
        planted.store.transaction(planted.domain) as txn,
        pytest.raises(DamageError, match="tail sha256:0000"),
    ):
        txn.commit(hold, put_state(txn, planted.agent_id, None, range(300)), None)


def test_look_ups_and_usage_count_it(planted: Planted) -> None:
    found = planted.commit(300)
    affected = affected_agents(planted.store, {planted.domain.id: {found}})
    assert affected == {(planted.domain.id, found): {"a"}}
    usage = Usage(planted.store, planted.store.agents())
    assert (planted.domain.id, found.sha256) in usage.files


@pytest.mark.parametrize("document", [Manifest, Page])
def test_every_field_with_rows_is_in_a_table(document: type) -> None:
    """Fields are found by their types, so that a new one cannot be left out."""
    hints = {name: str(hint) for name, hint in get_type_hints(document).items()}
    naming = {name for name, hint in hints.items() if any(row.__name__ in hint for row in (FileRow, BlockRow))}
    if document is Manifest:
        assert naming == {reference.field for reference in STATE_REFERENCES}
    else:
        assert naming == {"blocks"}
        assert [(each.source, each.kind) for each in OBJECT_REFERENCES] == [(PAGE, BLOCK)]


def test_every_link_to_a_state_is_in_the_table(store: Store) -> None:
    commit(store, "a", range(300))
    commit(store, "a", range(600))
    agent = store.agent("a")
    data = store.read_object(agent.domain, StoredObject(OBJECT_KINDS[0], agent.manifest))
    digests = {key for key, value in json.loads(data).items() if isinstance(value, str) and len(value) == 64}
    assert digests - {"salt"} <= set(STATE_LINKS)
    hints = get_type_hints(Manifest)
    assert {name for name, hint in hints.items() if hint == hints["previous"]} >= set(STATE_LINKS)


def test_the_planted_reference_is_the_only_difference(planted: Planted) -> None:
    planted.commit(300)
    manifest = planted.store.resolve(Ref("a")).manifest
    kinds = [named.object.kind for named in named_by(manifest)]
    assert kinds.count(TAIL) == 2
