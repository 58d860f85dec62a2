"""Every bit of the journal counts."""

import random

from kvstore.commit.journal import Change
from kvstore.commit.refs import moving
from kvstore.store import Store
from kvstore.verify.checks import Checks
from kvstore.verify.verify import verify
from tests.support.damaging import B, flip, found, only
from tests.support.making import ACTOR, commit, journal


def test_every_bit_of_the_journal_counts(full: Store) -> None:
    path = full.layout.journal
    whole = path.read_bytes()
    rng = random.Random(1)
    last = whole[:-1].rindex(b"\n") + 1
    for place in [rng.randrange(last) for _ in range(40)]:
        path.write_bytes(flip(whole, place))
        assert "journal" in {finding.kind for finding in found(full, Checks(None, isolation=False))}, place
    head = verify(full, Checks(None)).journal_head
    path.write_bytes(whole)
    head = verify(full, Checks(None)).journal_head
    for place in range(last, len(whole)):
        path.write_bytes(flip(whole, place))
        assert found(full, Checks(None, isolation=False, journal_head=head)), place


def test_a_journal_that_was_cut_off(full: Store) -> None:
    head = journal(full.layout.root)[-1].digest
    assert found(full, Checks(None, journal_head=head[:20])) == []
    whole = full.layout.journal.read_bytes()
    full.layout.journal.write_bytes(whole[: whole[:-1].rindex(b"\n") + 1])
    findings = found(full, Checks(None, journal_head=head))
    assert [finding.agents for finding in findings] == [("c",), ()]
    full.layout.agent_ref("c").unlink()  # with its refs put back, a cut is seen by the head only
    assert found(full, Checks(None)) == []
    assert only(full, Checks(None, journal_head=head)).kind == "journal"
    full.layout.journal.unlink()
    assert {name for f in found(full, Checks(None)) for name in f.agents} == {"a", "b"}


def test_an_intent_whose_ref_did_not_follow_is_legal(full: Store) -> None:
    agent = full.agent("a")
    with moving(full.layout, ACTOR) as writer:
        writer.append(Change("chat", agent.id, agent.domain, agent.manifest, "0" * 64))
    assert found(full) == []
    commit(full, "a", B)  # which marks it void
    assert found(full) == []
