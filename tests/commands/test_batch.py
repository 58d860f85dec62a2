"""`amem batch` as a script drives it: lines in, lines out, in any order, each with its own end."""

import json
import re
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore.naming import Ref
from kvstore.store import Store
from tests.commands.conftest import ACTOR
from tests.support.models.endless import endless_model
from tests.support.running import children
from tests.support.running.amem import COMMAND, Amem, lines
from tests.support.running.terminal import Terminal

Line = dict[str, Any]
TURN_KEYS = (
    "type line id op agent ok state model domain manifest before tokens reused prefilled generated parted_at load_ms "
    "ttft_ms new_blocks bytes_written seconds complete recomputed"
)


def ndjson(*requests: Line) -> bytes:
    return "".join(json.dumps(request) + "\n" for request in requests).encode()


def prefill(agent: str, **more: Any) -> Line:
    return {"id": f"make-{agent}", "op": "prefill", "agent": agent, "text": f"hello {agent}", **more}


def chat(key: str, agent: str, message: Any = "well?", **more: Any) -> Line:
    return {"id": key, "op": "chat", "agent": agent, "message": message, "max_tokens": 4, **more}


def by_id(told: list[Line]) -> dict[str, Line]:
    return {line["id"]: line for line in told if line["type"] == "turn" and line["id"]}


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
    requests = ndjson(
        prefill("a"),
        chat("large", "a", max_tokens=100_000),
        chat("late", "a", max_tokens=3000, timeout=0.5),
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


def start(environment: dict[str, str], model: Path, stderr: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    """`amem batch` with lines on its standard input."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": stderr}
    return children.start(*COMMAND, "batch", "-", "--model", model, bufsize=0, env=environment, **pipes)


@pytest.fixture
def coprocess(model: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    return start(environment, model)


def ask(process: subprocess.Popen[bytes], request: Line) -> None:
    assert process.stdin is not None
    process.stdin.write(ndjson(request))
    process.stdin.flush()


def answer(process: subprocess.Popen[bytes]) -> Line:
    """The next line; it must come without any further input."""
    assert process.stdout is not None
    found, _, _ = select.select([process.stdout], [], [], children.LIMIT)
    assert found, "no answer came"
    line: Line = json.loads(process.stdout.readline())
    return line


def test_a_script_asks_and_is_answered_line_by_line(coprocess: subprocess.Popen[bytes]) -> None:
    ask(coprocess, prefill("a"))
    assert answer(coprocess)["id"] == "make-a"
    for number in range(3):
        ask(coprocess, chat(str(number), "a", [{"text_of": str(number - 1)}] if number else "go"))
        line = answer(coprocess)
        assert (line["id"], line["ok"]) == (str(number), True)
    ask(coprocess, chat("waits", "a", after=["later"]))
    ask(coprocess, chat("later", "nobody"))
    assert [answer(coprocess)["state"] for _ in range(2)] == ["failed", "skipped"]
    assert coprocess.stdin is not None
    coprocess.stdin.close()
    assert (answer(coprocess)["type"], coprocess.wait(children.LIMIT)) == ("result", 3)


def test_bash_drives_it_as_a_coprocess(model: Path, environment: dict[str, str]) -> None:
    script = r"""
        coproc AMEM { "$PYTHON" -m amem_cli batch - --model "$MODEL" 2>/dev/null; }
        exec {out}<&"${AMEM[0]}" {in}>&"${AMEM[1]}"
        say() { printf '%s\n' "$1" >&"$in"; IFS= read -r line <&"$out"; printf '%s\n' "$line"; }
        say '{"id":"1","op":"prefill","agent":"a","text":"hello"}'
        say '{"id":"2","op":"chat","agent":"a","message":"well?","max_tokens":3}'
        eval "exec ${AMEM[1]}>&-"
        exec {in}>&-
        cat <&"$out"
    """
    variables = {**environment, "PYTHON": sys.executable, "MODEL": str(model)}
    done = children.run("bash", "-c", script, env=variables)
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line.get("id", line["type"]) for line in told] == ["1", "2", "result"], done.stderr
    assert told[-1]["ok"] is True


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_commits_what_is_said(model: Path, signum: signal.Signals, environment: dict[str, str]) -> None:
    with Terminal() as terminal:
        process = start({**environment, "TERM": "xterm"}, model, stderr=terminal.device)
        terminal.hand_over()
        for request in (prefill("a"), prefill("b")):
            ask(process, request)
        before = {line["agent"]: line for line in (answer(process), answer(process))}
        for request in (
            chat("1", "a", max_tokens=100_000),
            chat("2", "b", max_tokens=100_000),
            chat("3", "a"),
            chat("4", "b", after=["nobody"]),
        ):
            ask(process, request)
        terminal.wait_for(rb"\ba +answering")
        terminal.wait_for(rb"\bb +answering")
        process.send_signal(signum)
        told = {line["id"]: line for line in (answer(process) for _ in range(4))}
        assert {line["state"] for line in told.values()} == {"interrupted"}
        assert {line["exit"] for line in told.values()} == {128 + signum}
        assert (answer(process)["interrupted"], process.wait(children.LIMIT)) == (4, -signum)
    store = Store.open(Path(environment["AMEM_STORE"]), ACTOR)
    for key, agent in (("1", "a"), ("2", "b")):
        manifest = store.resolve(Ref(agent)).manifest
        assert manifest.stop == "interrupted"
        assert manifest.tokens == told[key]["tokens"] > before[agent]["tokens"] + told[key]["generated"] > 0


def test_a_closed_output_ends_it_and_loses_nothing(
    coprocess: subprocess.Popen[bytes], environment: dict[str, str]
) -> None:
    ask(coprocess, prefill("a"))
    answer(coprocess)
    assert coprocess.stdout is not None
    coprocess.stdout.close()
    ask(coprocess, chat("1", "a"))
    ask(coprocess, chat("2", "a", max_tokens=100_000))
    assert coprocess.wait(children.LIMIT) == -signal.SIGPIPE
    assert Store.open(Path(environment["AMEM_STORE"]), ACTOR).resolve(Ref("a")).manifest.op == "chat"


def test_a_terminal_shows_a_table_and_lines_stay_whole(model: Path, environment: dict[str, str]) -> None:
    """Standard error is a terminal; standard output is a pipe, or that terminal as well."""
    path = Path(environment["HOME"], "turns.jsonl")
    path.write_bytes(ndjson(prefill("talker"), chat("1", "talker", max_tokens=200), chat("2", "talker")))
    command = (*COMMAND, "batch", path, "--model", model)
    for shared in (False, True):
        with Terminal() as terminal:
            output = terminal.device if shared else subprocess.PIPE
            env = {**environment, "TERM": "xterm"}
            process = children.start(*command, env=env, stdout=output, stderr=terminal.device)
            terminal.hand_over()
            piped = process.stdout.read() if process.stdout else b""
            shown = terminal.rest()
            assert process.wait(children.LIMIT) == 0
        assert b"TOKENS/S" in shown and b"talker" in shown
        whole = [line for line in (shown if shared else piped).splitlines() if line.startswith(b'{"type":"result"')]
        assert len(whole) == 1 and json.loads(whole[0])["done"] == 3
        assert shared or all(json.loads(line) for line in piped.splitlines())
