"""`amem batch` on whole files: lines in, lines out, in any order, each with its own end."""

import re
from pathlib import Path

import pytest

from kvstore.naming import Ref
from kvstore.store import Store
from tests.commands.conftest import ACTOR
from tests.support.models.endless import endless_model
from tests.support.running.amem import Amem, lines
from tests.support.running.requests import by_id, chat, ndjson, prefill

TURN_KEYS = (
    "type line id op agent ok state model domain manifest before tokens reused prefilled generated parted_at load_ms "
    "ttft_ms new_blocks bytes_written seconds complete recomputed"
)


def test_a_debate_is_one_file(amem: Amem, model: Path, environment: dict[str, str]) -> None:
    requests = [
        chat("reply", "sceptic", ["She says: ", {"text_of": "claim"}, " Do you agree?"], phase="second"),
        prefill("optimist", system="Hope.", domain="debate"),
        chat("claim", "optimist", "What will be?", phase="first"),
        {"id": "named", "op": "snapshot", "agent": "sceptic", "name": "end", "note": "over"},
        chat("judge", "judge", [{"text_of": "claim"}, " or ", {"text_of": "reply"}, "?"], fork_from="optimist"),
        {"id": "add", "op": "extend", "agent": "judge", "text": "that was it", "phase": "last"},
        chat("aside", "sceptic@end", "in short?", save=False),
    ]
    requests[0]["after"] = ["make-sceptic"]
    Path(environment["HOME"], "debate.jsonl").write_bytes(
        ndjson(prefill("sceptic"), *requests[1:3], requests[0], *requests[3:])
    )
    done = amem("batch", "debate.jsonl", "--model", str(model))
    told = lines(done)
    assert done.returncode == 0, done.stdout + done.stderr
    *turns, result = told
    assert result["type"] == "result" and result["command"] == "batch" and result["ok"] is True
    assert [result[key] for key in ("done", "failed", "skipped", "interrupted")] == [8, 0, 0, 0]
    assert result["row_by_row_steps"] == 0
    assert result["generated"] == sum(turn.get("generated", 0) for turn in turns) == 16
    found = by_id(turns)
    assert list(found["make-optimist"]) == TURN_KEYS.split()
    assert list(found["aside"]) == [*TURN_KEYS.split(), "text", "finish", "seed", "temp"]
    assert found["aside"]["manifest"] is None and found["aside"]["reused"] > 0
    assert (found["named"]["ref"], found["reply"]["phase"]) == ("sceptic@end", "second")
    assert found["judge"]["domain"] == "debate" and found["judge"]["reused"] > 0
    store = Store.open(Path(environment["AMEM_STORE"]), ACTOR)
    state = store.resolve(Ref("sceptic"))
    [second] = [turn for turn in state.manifest.turns if turn.label == "second"]
    said = f"She says: {found['claim']['text']} Do you agree?".encode()
    assert len(said) < second.end - second.start < len(said) + 20  # a token for each byte, and the template's


def test_the_debate_of_the_documents(amem: Amem, model: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "howto" / "batch.md"
    [debate] = re.findall(r"^```jsonl\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S)
    done = amem("batch", "-", "--model", str(model), stdin=debate.encode())
    *turns, result = lines(done)
    assert (done.returncode, result["done"]) == (0, debate.count("\n"))
    assert [turn["phase"] for turn in turns if "phase" in turn][-1] == "verdict"
    assert result["generated"] == 7 * 24
    assert by_id(turns)["judge"]["reused"] == by_id(turns)["p1"]["tokens"] - 1


def test_each_line_fails_alone(amem: Amem, model: Path) -> None:
    requests = ndjson(
        prefill("a"),
        chat("lost", "nobody"),
        chat("skipped", "a", after=["lost"]),
        chat("twice", "a"),
        chat("twice", "a"),
        chat("other-model", "a", model="no-such-model"),
        chat("no-text", "a", [{"text_of": "make-a"}]),
        chat("unknown", "a", after=["none"]),
        {"id": "bad", "op": "chat", "agent": "a", "message": "x", "top_k": 3},
        chat("behind-bad", "a", after=["bad"]),
        chat("good", "a"),
    )
    done = amem("batch", "-", "--model", str(model), stdin=requests + b"\n\nno json\n")
    told = lines(done)
    assert done.returncode == 3
    result = told[-1]
    assert [result[key] for key in ("ok", "done", "failed", "skipped", "interrupted")] == [False, 3, 7, 2, 0]
    assert len(told) == 13
    ends = {(line["line"], line["state"], line.get("code"), line.get("exit")) for line in told[:-1]}
    assert ends == {
        (1, "done", None, None),
        (2, "failed", "not-found", 4),
        (3, "skipped", "skipped", 3),
        (4, "done", None, None),
        (5, "failed", "usage", 2),
        (6, "failed", "not-found", 4),
        (7, "failed", "usage", 2),
        (8, "failed", "usage", 2),
        (9, "failed", "usage", 2),
        (10, "skipped", "skipped", 3),
        (11, "done", None, None),
        (14, "failed", "usage", 2),
    }
    assert all(line["ok"] is (line["state"] == "done") for line in told[:-1])


def test_one_model_a_process(amem: Amem, model: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = endless_model(tmp_path_factory.mktemp("other"))
    requests = ndjson(prefill("a", model=str(model)), prefill("b", model=str(other)), prefill("c"))
    done = amem("batch", "-", stdin=requests)
    found = by_id(lines(done))
    assert done.returncode == 3
    assert found["make-b"]["code"] == "model-mismatch" and found["make-b"]["exit"] == 6
    assert found["make-c"]["model"] == found["make-a"]["model"]


def test_what_is_wrong_before_the_first_line(amem: Amem, environment: dict[str, str]) -> None:
    for arguments, code in (
        (("no-file",), 4),
        ((".",), 2),
        (("-", "--model", "none"), 4),
        (("-", "--memory", "much"), 2),
    ):
        assert amem("batch", *arguments).returncode == code
    [error] = lines(amem("batch", "no-file"))
    assert (error["type"], error["exit"]) == ("error", 4)
    [result] = lines(amem("batch", "-"))
    assert (result["ok"], result["done"]) == (True, 0)
    [line, result] = lines(amem("batch", "-", stdin=ndjson(chat("1", "a"))))
    assert (line["exit"], result["failed"]) == (10, 1)
    assert not Path(environment["AMEM_STORE"]).exists()


def test_a_turn_too_large_for_memory_and_one_whose_time_is_over(amem: Amem, model: Path) -> None:
    made = amem("batch", "-", "--model", str(model), stdin=ndjson(prefill("a"), chat("pace", "a", max_tokens=60)))
    pace = by_id(lines(made))["pace"]["seconds"]
    requests = ndjson(
        chat("large", "a", max_tokens=100_000),
        chat("late", "a", max_tokens=3000, timeout=10 * pace),  # enough to begin, not to end
        chat("next", "a", [{"text_of": "late"}]),
    )
    done = amem("batch", "-", "--model", str(model), "--memory", "4MB", "--no-batch", stdin=requests)
    found = by_id(lines(done))
    assert done.returncode == 3
    assert (found["large"]["code"], found["large"]["exit"]) == ("no-space", 13) and "4,000,000" in found["large"][
        "message"
    ]
    assert (found["late"]["state"], found["late"]["finish"]) == ("interrupted", "interrupted")
    assert found["late"]["manifest"] and found["late"]["generated"] > 0
    assert found["next"]["state"] == "skipped"
