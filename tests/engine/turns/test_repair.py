"""Blocks come back from their tokens under the digests that they had."""

from collections.abc import Callable
from pathlib import Path

import pytest

from amem_cli.engine.prompt.transcript import Text
from amem_cli.engine.turns.engine import Engine
from amem_cli.engine.turns.repair import repair
from amem_cli.engine.turns.requests import NOBODY, ChatOptions, Watcher
from kvstore import lifecycle
from kvstore.errors import DamageError
from kvstore.format.document import replace
from kvstore.format.kinds import BLOCK, TAIL
from kvstore.naming import Ref
from tests.support.engine.places import SENTENCE, SHORT, Place
from tests.support.models.chat import KINDS, Kind

Tiny = Callable[[Kind], Path]


def block_files(place: Place, ref: str) -> list[Path]:
    state = place.state(ref)
    return [
        place.store.layout.object(state.agent.domain, BLOCK, row.sha256) for row in place.store.blocks(state.manifest)
    ]


def talked(engine: Engine) -> None:
    engine.prefill("a", [Text(SENTENCE * 45)])
    engine.chat(Ref("a"), [Text("And then?")], SHORT)
    engine.extend("a", [Text(SENTENCE * 9)])


@pytest.mark.parametrize("kind", KINDS)
def test_missing_and_altered_files_come_back(kind: Kind, tiny: Tiny, place: Place) -> None:
    engine = place.engine(tiny(kind))
    talked(engine)
    lifecycle.snapshot(place.store, Ref("a"), "s")
    head = place.state("a")
    expected = engine.chat(Ref("a"), [Text("Well?")], SHORT, ChatOptions(save=False)).text
    assert head.manifest.tail is not None
    files = block_files(place, "a")
    before = {path: path.read_bytes() for path in files}
    files[0].unlink()
    files[-1].chmod(0o600)
    files[-1].write_bytes(before[files[-1]][:-1] + b"\x7f")
    tail = place.store.layout.object(head.agent.domain, TAIL, head.manifest.tail.sha256)
    tail.unlink()
    with pytest.raises(DamageError):
        place.engine(tiny(kind)).chat(Ref("a"), [Text("Well?")], SHORT, ChatOptions(save=False))

    done = repair(place.store, place.engine(tiny(kind)).agents, Ref("a"), 0, NOBODY)
    assert done.healed_blocks == 2 and not done.recomputed and done.manifest == head.digest
    assert {path: path.read_bytes() for path in files} == before
    assert (
        place.engine(tiny(kind)).chat(Ref("a", snapshot="s"), [Text("Well?")], SHORT, ChatOptions(save=False)).text
        == expected
    )


@pytest.mark.long
def test_every_tenth_block_deleted(tiny: Tiny, place: Place) -> None:
    engine = place.engine(tiny("llama"))
    engine.prefill("a", [Text(SENTENCE * 200)])
    files = block_files(place, "a")
    assert len(files) > 12
    for path in files[::10]:
        path.unlink()
    done = repair(place.store, engine.agents, Ref("a"), 0, NOBODY)
    assert done.healed_blocks == len(files[::10]) and done.manifest == done.before
    assert all(path.is_file() for path in files)


def test_a_whole_agent_is_left_alone(tiny: Tiny, place: Place) -> None:
    engine = place.engine(tiny("llama"))
    talked(engine)
    blocks = {path: path.stat().st_mtime_ns for path in block_files(place, "a")}
    done = repair(place.store, engine.agents, Ref("a"), 0, NOBODY)
    assert (done.healed_blocks, done.bytes_written, done.recomputed) == (0, 0, False)
    assert {path: path.stat().st_mtime_ns for path in block_files(place, "a")} == blocks


@pytest.mark.long
def test_other_bits_make_a_new_head_and_snapshots_stay(tiny: Tiny, place: Place) -> None:
    """Passes that are not those that made the blocks: the record is false here, as another machine's bits would be."""
    engine = place.engine(tiny("llama"))
    talked(engine)
    state = place.state("a")
    with place.store.hold("a", 0) as hold, place.store.transaction(place.store.domain(state.agent.domain)) as txn:
        false = replace(state.manifest, feeds=((1, state.manifest.cached),), previous=state.digest)
        txn.commit(hold, false, state.digest)
    lifecycle.snapshot(place.store, Ref("a"), "s")
    block_files(place, "a")[1].unlink()
    named = place.state("a@s").digest
    with pytest.raises(DamageError, match="other bits"):
        repair(place.store, engine.agents, Ref("a", snapshot="s"), 0, NOBODY)
    done = repair(place.store, engine.agents, Ref("a"), 0, NOBODY)
    assert done.recomputed and done.manifest == place.state("a").digest != done.before
    assert place.state("a").manifest.recomputed and place.state("a@s").digest == named
    assert engine.chat(Ref("a"), [Text("Well?")], SHORT).recomputed


def test_stopped_it_changes_nothing(tiny: Tiny, place: Place) -> None:
    engine = place.engine(tiny("llama"))
    talked(engine)
    gone = block_files(place, "a")[0]
    gone.unlink()
    done = repair(place.store, engine.agents, Ref("a"), 0, Watcher(should_stop=lambda: True))
    assert not done.complete and not gone.exists()
