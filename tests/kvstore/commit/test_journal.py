from pathlib import Path

import pytest

from kvstore.commit.journal import NO_LINE, Actor, Change, read_journal, writing
from kvstore.errors import DamageError, UsageError
from kvstore.format.layout import StoreLayout
from tests.support.making import ACTOR

CHANGE = Change("chat", "a" * 32, "d" * 32, None, "1" * 64, "a note")


@pytest.fixture
def layout(tmp_path: Path) -> StoreLayout:
    layout = StoreLayout(tmp_path)
    layout.locks.mkdir()
    return layout


def append(layout: StoreLayout, change: Change = CHANGE, followed: bool = True) -> None:
    with writing(layout, ACTOR, lambda _: followed) as journal:
        journal.append(change)


def ops(layout: StoreLayout) -> list[str]:
    return [entry.change.op for entry in read_journal(layout.journal)]


def test_lines_form_a_chain(layout: StoreLayout) -> None:
    assert ops(layout) == []
    for _ in range(3):
        append(layout)
    first, _, third = read_journal(layout.journal)
    assert (first.seq, first.prev, third.seq) == (1, NO_LINE, 3)
    assert (first.change, first.via, first.actor.claimed) == (CHANGE, "test", "tester")


@pytest.mark.parametrize("damage", ["flip", "drop", "swap"])
def test_a_changed_line_is_found(layout: StoreLayout, damage: str) -> None:
    for _ in range(3):
        append(layout)
    one, two, three = layout.journal.read_bytes().splitlines(keepends=True)
    changed = {"flip": [one, two.replace(b"note", b"nota"), three], "drop": [one, three], "swap": [two, one, three]}
    layout.journal.write_bytes(b"".join(changed[damage]))
    with pytest.raises(DamageError, match="line"):
        ops(layout)


def test_a_torn_line_is_legal_and_cut_off(layout: StoreLayout) -> None:
    append(layout)
    append(layout)
    data = layout.journal.read_bytes()
    for cut in range(1, len(data) // 2, 13):
        layout.journal.write_bytes(data[:-cut])
        assert ops(layout) == ["chat"]
        append(layout)
        assert ops(layout) == ["chat", "chat"]


def test_an_intent_without_its_ref_is_void(layout: StoreLayout) -> None:
    append(layout)
    append(layout, followed=False)
    assert ops(layout) == ["chat", "void", "chat"]
    append(layout, followed=True)
    assert ops(layout) == ["chat", "void", "chat", "chat"]


def test_a_void_line_is_not_voided(layout: StoreLayout) -> None:
    append(layout)
    for _ in range(2):
        with writing(layout, ACTOR, lambda _: False):
            pass
    assert ops(layout) == ["chat", "void"]


def test_a_damaged_last_line_stops_no_writer(layout: StoreLayout) -> None:
    append(layout)
    layout.journal.write_bytes(layout.journal.read_bytes() + b"\0\0\0\n")
    append(layout)
    assert layout.journal.read_bytes().count(b"\n") == 3
    with pytest.raises(DamageError, match="line 2"):
        ops(layout)


def test_a_note_that_does_not_fit(layout: StoreLayout) -> None:
    with pytest.raises(UsageError, match="too long"):
        append(layout, Change("chat", "a", "d", None, "1", "x" * (1 << 16)))
    append(layout)
    assert ops(layout) == ["chat"]


def test_the_actor_is_this_user() -> None:
    actor = Actor.here(via="chat", version="1", claimed="me")
    assert actor.user and actor.host and actor.claimed == "me"
