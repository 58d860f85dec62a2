"""A store that version 0.1.0 made is read, verified, continued and collected by the code of today.

`tests/data/make_store.py` made the store with that version's code, and wrote down what that version says of it. What
is stored must be loaded bit for bit on every machine. What is computed from it must be the same tokens wherever the
likeliest one leads clearly, and was chosen to do so. On the machine that made the store it must be the same bits:
AMEM_SAME_MACHINE=1 in the environment says that this is the one, or one with the same processor and packages.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.support import recording
from tests.support.old_store import OldStore
from tests.support.recording import Commands, Line

pytestmark = pytest.mark.long

DATA = Path(__file__).parent
EXPECTED: dict[str, Any] = json.loads((DATA / "expected-0.1.0.json").read_bytes())
STATES: dict[str, Line] = EXPECTED["states"]
HEADS = [ref for ref in STATES if "@" not in ref]
SAME_MACHINE = os.environ.get("AMEM_SAME_MACHINE") == "1"
NOT_FOUND = 4
NEW_WORDS = {"delete": "deleted", "evict": "evicted", "keep": "kept", "fail": "failed"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where models' digests are kept, and what a user has."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store as it was made. Never change what is in it."""
    return recording.unpack(DATA / "store-0.1.0.tar.xz", tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="module")
def opened(made: Path, home: Path) -> OldStore:
    """The store as it was made, in this process. It is only read."""
    return OldStore(made, home)


@pytest.fixture(scope="module")
def collected(made: Path, home: Path, tmp_path_factory: pytest.TempPathFactory) -> Commands:
    """A copy of the store in which nothing stands but what its agents and snapshots need. Tests go on with it."""
    run = Commands(recording.copy(made, tmp_path_factory.mktemp("collected") / "store"), home)
    run("gc", "--keep-history", "0")
    return run


@pytest.fixture(scope="module")
def working(collected: Commands, home: Path) -> OldStore:
    """The same copy in this process."""
    return OldStore(collected.store, home)


def known(lines: Iterable[Line], as_in: Iterable[Line]) -> list[Line]:
    """The fields of each line that a recorded line has, too: there may be more by now."""
    return [{key: line.get(key) for key in old} for line, old in zip(lines, as_in, strict=True)]


def renamed(line: Line) -> Line:
    """A recorded line with the words that gc has used for its actions since."""
    return {**line, "action": NEW_WORDS[line["action"]]} if line.get("action") in NEW_WORDS else line


def objects(store: Path) -> set[str]:
    """The digests of all files in a store's domains that are named by theirs."""
    return {path.stem for path in (store / "domains").glob("*/*/*/*")}


@pytest.mark.parametrize("what", recording.LOOKS)
def test_commands_say_what_they_said(what: str, made: Path, home: Path) -> None:
    old = [renamed(line) for line in EXPECTED["commands"][what]]
    lines = Commands(made, home)(*recording.LOOKS[what])
    if what == "gc":  # in the order of the file system
        old, lines = (sorted(each, key=lambda line: str(line.get("name"))) for each in (old, lines))
    assert known(lines, old) == old


def test_all_agents_and_snapshots_are_there(opened: OldStore) -> None:
    assert sorted(opened.refs()) == sorted(STATES)


@pytest.mark.parametrize("ref", STATES)
def test_a_state_is_loaded_bit_for_bit(ref: str, opened: OldStore) -> None:
    """Its tokens and its objects, and the bytes of each block and tail in an agent's cache."""
    now = json.loads(json.dumps(recording.look(opened, ref)))
    assert now == {key: STATES[ref][key] for key in now}


@pytest.mark.parametrize("ref", ["guide", "windows@read", "both", "gone-states"])
def test_it_answers_what_it_answered(ref: str, made: Path, home: Path) -> None:
    """By the command, from a head, a snapshot and an evicted agent, and without a trace."""
    before = objects(made), (made / "journal.jsonl").read_bytes()
    old = STATES[ref]["answer"]
    settings = ("--max-tokens", str(recording.ANSWER), "--temp", "0", "--no-save")
    answer = Commands(made, home)("chat", ref, old["question"], *settings)[-1]
    assert (answer["text"], answer["recomputed"]) == (old["text"], old["recomputed"])
    assert (objects(made), (made / "journal.jsonl").read_bytes()) == before


def test_gc_collects_exactly_what_it_would_have(made: Path, collected: Commands) -> None:
    *lines, result = EXPECTED["commands"]["gc"]
    gone = {line["name"] for line in lines if line["kind"] in ("block", "tail", "page", "manifest")}
    assert len(gone) == result["freed_objects"] > 0
    needed = {digest for state in STATES.values() for digest in (state["digest"], *state["objects"])}
    assert not gone & needed
    assert objects(made) - objects(collected.store) == gone
    assert needed <= objects(collected.store)
    *left, after = collected("gc", "--dry-run", "--keep-history", "0")
    assert (left, after["kept_objects"], after["kept_bytes"]) == ([], result["kept_objects"], result["kept_bytes"])


def test_the_collected_store_is_whole(collected: Commands) -> None:
    report = collected("verify", "--deep")[-1]
    assert (report["findings"], report["store_id"]) == (0, EXPECTED["commands"]["verify"][-1]["store_id"])


@pytest.mark.parametrize("name", ["removed", "lost", "erased"])
def test_a_removed_agent_stays_removed(name: str, made: Path, home: Path, collected: Commands) -> None:
    for run in (Commands(made, home), collected):
        assert run("log", name, code=NOT_FOUND)[-1]["code"] == "not-found"


def check_answer(store: OldStore, ref: str, agent: str, old: Line) -> None:
    """`agent`, which is at the state `ref`, answers as that state did."""
    now = recording.answer(store, ref, agent, old["question"])
    same = set(old) if SAME_MACHINE else {"ids", "text", "recomputed"}
    assert {key: now[key] for key in same} == {key: old[key] for key in same}


@pytest.mark.parametrize("ref", [ref for ref in STATES if ref != "cut"])
def test_a_state_goes_on_as_it_did(ref: str, working: OldStore) -> None:
    """Heads by a turn of their own, snapshots by a fork. One that was evicted computes its cache again."""
    agent, state = ref, STATES[ref]
    if ref not in HEADS:
        agent = ref.replace("@", "-")
        working.fork(ref, agent)
    at = f"{ref.partition('@')[0]}@sha256:{state['digest']}"
    if SAME_MACHINE:
        working.fork(at, f"{agent}-drawn")
        drawn = recording.sampled_answer(working, f"{agent}-drawn", state["answer"]["question"])
        assert drawn == state["sampled"]
    check_answer(working, at, agent, state["answer"])


def test_a_prefill_that_was_cut_short_is_finished(working: OldStore) -> None:
    state = STATES["cut"]
    assert working.prefill("cut", state["text"], state["model"])
    done = recording.look(working, "cut")
    assert state["loaded"].items() <= {**done["loaded"], "full-0 tail": state["loaded"]["full-0 tail"]}.items()
    assert (done["tokens_sha256"], done["cached"]) == (state["tokens_sha256"], state["tokens"] - 1)
    if SAME_MACHINE:
        assert done["loaded"] == state["finished"]
    check_answer(working, f"cut@sha256:{done['digest']}", "cut", state["answer"])


@pytest.mark.parametrize("ref", ["guide@first", "windows@read", "gone-named@before"])
def test_a_snapshot_is_gone_back_to(ref: str, working: OldStore) -> None:
    """A restored head loads what the snapshot loads, and goes on like it."""
    agent = ref.partition("@")[0]
    working.restore(ref)
    assert working.state(agent).op == "restore"
    assert recording.look(working, agent)["loaded"] == STATES[ref]["loaded"]
    check_answer(working, ref, agent, STATES[ref]["answer"])


def test_it_is_still_whole(collected: Commands, working: OldStore) -> None:
    """After all that was said and moved."""
    assert set(working.refs()) >= set(STATES)
    assert collected("verify", "--deep")[-1]["findings"] == 0
