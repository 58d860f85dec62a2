"""`amem batch` as a script drives it: lines in, lines out, in any order, each with its own end."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from amem_cli.batching.order import Order
from amem_cli.batching.requests import Request, TextOf, parse, read_object
from kvstore.errors import UsageError
from kvstore.naming import Ref
from kvstore.store import Store
from tests.commands.conftest import ACTOR, Amem, lines
from tests.commands.tiny import make_tiny_model

Line = dict[str, Any]
TURN_KEYS = (
    "type line id op agent ok state model domain manifest before tokens reused prefilled generated parted_at load_ms "
    "ttft_ms new_blocks bytes_written seconds complete recomputed"
)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def ndjson(*requests: Line) -> bytes:
    return "".join(json.dumps(request) + "\n" for request in requests).encode()


def prefill(agent: str, **more: Any) -> Line:
    return {"id": f"make-{agent}", "op": "prefill", "agent": agent, "text": f"hello {agent}", **more}


def chat(key: str, agent: str, message: Any = "well?", **more: Any) -> Line:
    return {"id": key, "op": "chat", "agent": agent, "message": message, "max_tokens": 4, **more}


def by_id(told: list[Line]) -> dict[str, Line]:
    return {line["id"]: line for line in told if line["type"] == "turn" and line["id"]}


# --- lines as requests


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"{", "not JSON"),
        (b"\xff", "not UTF-8"),
        (b"[1]", "not an object"),
        (b"[" * 100_000, "not JSON"),
        (b'{"op": "chat", "agent": "a", "message": "x"}', "no id"),
        (b'{"id": "1", "agent": "a", "message": "x"}', "no op"),
        (b'{"id": 1, "op": "chat", "agent": "a", "message": "x"}', "id is not"),
        (b'{"id": "1", "op": "sing", "agent": "a", "message": "x"}', "op is not"),
        (b'{"id": "1", "op": "chat", "agent": "a b", "message": "x"}', "cannot be the name"),
        (b'{"id": "1", "op": "chat", "agent": "a", "message": ""}', "empty"),
        (b'{"id": "1", "op": "chat", "agent": "a"}', "empty"),
        (b'{"id": "1", "op": "chat", "agent": "a", "message": "x", "text": "y"}', "two texts"),
        (b'{"id": "1", "op": "chat", "agent": "a", "message": [{"text": "b"}]}', "message is not"),
        (b'{"id": "1", "op": "chat", "agent": "a", "message": "\\ud800"}', "not UTF-8"),
        (b'{"id": "1", "op": "chat", "agent": "a", "message": "x", "mesage": 1}', "unknown"),
        (b'{"id": "1", "op": "chat", "agent": "a", "message": "x", "system": "s"}', "chat takes no 'system'"),
        (b'{"id": "1", "op": "chat", "agent": "a", "message": "x", "temp": NaN}', "not JSON"),
        (b'{"id": "1", "op": "chat", "agent": "a", "message": "x", "max_tokens": 0}', "max_tokens is not"),
        (b'{"id": "1", "op": "chat", "agent": "a", "message": "x", "max_tokens": true}', "max_tokens is not"),
        (b'{"id": "1", "op": "chat", "agent": "a", "message": "x", "timeout": -1}', "timeout is not"),
        (b'{"id": "1", "op": "chat", "agent": "a~1", "message": "x"}', "not the head"),
        (b'{"id": "1", "op": "chat", "agent": "a", "message": "x", "save": false, "fork_from": "b"}', "fork"),
        (b'{"id": "1", "op": "prefill", "agent": "a", "text": "x", "save": false}', "prefill takes no 'save'"),
    ],
)
def test_what_is_no_request_is_told_without_its_text(line: bytes, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        parse(1, read_object(line))
    assert '"x"' not in f"{caught.value.message} {caught.value.hint}".replace('{"id"', "")


def test_a_line_is_read_whole() -> None:
    line = ndjson(
        chat("1", "a", ["He says: ", {"text_of": "0"}, "!"], after="z", stop="END", temp=1, seed=7, phase="p")
    )
    request = parse(3, read_object(line))
    assert request == Request(
        line=3,
        id="1",
        op="chat",
        agent=Ref("a"),
        text=("He says: ", TextOf("0"), "!"),
        phase="p",
        max_tokens=4,
        temp=1.0,
        seed=7,
        stop=("END",),
        after=("z",),
    )
    assert request.needs == ("z", "0")
    assert request.said({"0": "yes"}) == "He says: yes!"
    with pytest.raises(UsageError, match="'0' gives no text"):
        request.said({})


# --- who waits for whom


def order_of(*requests: Line) -> Order:
    order = Order()
    for number, request in enumerate(requests, start=1):
        order.add(parse(number, request))
    return order


def ready(order: Order) -> list[str]:
    found = [request.id for request in order.ready]
    order.ready.clear()
    return found


def dropped(order: Order) -> dict[str, str | None]:
    """Which requests never run, and the failure that they wait for; None: the error is their own."""
    found = {each.request.id: each.failed for each in order.dropped}
    order.dropped.clear()
    return found


def test_an_agents_requests_run_in_their_order_whatever_becomes_of_them() -> None:
    order = order_of(chat("1", "a"), chat("2", "A"), chat("3", "b"), chat("4", "a"))
    assert ready(order) == ["1", "3"]
    order.settle("1", done=False)
    assert ready(order) == ["2"]
    order.settle("2", done=True)
    assert ready(order) == ["4"]


def test_a_request_waits_for_later_lines_and_for_the_source_of_its_fork() -> None:
    order = order_of(chat("1", "a", after=["3"]), chat("2", "b", [{"text_of": "1"}]), chat("3", "c"))
    order.add(parse(4, chat("4", "d", fork_from="c@s")))
    assert ready(order) == ["3"]
    order.settle("3", done=True)
    assert ready(order) == ["1", "4"]
    order.settle("1", done=True)
    assert ready(order) == ["2"]


def test_what_depends_on_a_failure_is_skipped_however_far() -> None:
    far = [chat(str(n), f"a{n}", after=[str(n - 1)] if n else []) for n in range(3000)]
    order = order_of(*far)
    order.settle("0", done=False)
    assert dropped(order) == {str(n): str(n - 1) for n in range(1, 3000)}
    order.add(parse(1, chat("late", "x", after=["2999"])))
    assert dropped(order) == {"late": "2999"}


@pytest.mark.parametrize(
    "requests",
    [
        [chat("1", "a", after=["1"])],
        [chat("1", "a", after=["2"]), chat("2", "b", after=["1"])],
        [chat("1", "a", after=["2"]), chat("2", "a")],  # the second waits for the first, its agent's earlier one
        [chat("1", "a", [{"text_of": "3"}]), chat("2", "b", after=["1"]), chat("3", "c", after=["2"])],
    ],
)
def test_a_circle_fails_whole(requests: list[Line]) -> None:
    order = order_of(*requests, chat("other", "z", after=["1"]))
    assert dropped(order) == {**{request["id"]: None for request in requests}, "other": "1"}
    assert not ready(order)


def test_at_the_end_nothing_waits_for_ids_that_never_came() -> None:
    order = order_of(chat("1", "a", after=["nobody"]), chat("2", "b", after=["1"]), chat("3", "a"))
    order.close()
    assert dropped(order) == {"1": None, "2": "1"}
    assert ready(order) == ["3"]


# --- the command


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
    assert result["generated"] == sum(turn.get("generated", 0) for turn in turns) == 16
    found = by_id(turns)
    assert list(found["make-optimist"]) == TURN_KEYS.split()
    assert list(found["aside"]) == [*TURN_KEYS.split(), "text", "finish", "seed", "temp"]
    assert found["aside"]["manifest"] is None and found["aside"]["reused"] > 0
    assert (found["named"]["ref"], found["reply"]["phase"]) == ("sceptic@end", "second")
    assert found["judge"]["domain"] == "debate" and found["judge"]["reused"] > 0
    store = Store.open(Path(environment["AMEM_STORE"]), ACTOR)
    state = store.resolve(Ref("sceptic"))
    heard = bytes(token for token in store.tokens(state.manifest).tolist() if token < 256)
    assert b"Do" in heard or state.manifest.tokens > 20
    assert [turn.label for turn in state.manifest.turns].count("second") == 1


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
    other = make_tiny_model(tmp_path_factory.mktemp("other"))
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


@pytest.fixture
def coprocess(model: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "amem_cli", "batch", "-", "--model", str(model)]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        yield process
        process.kill()


def ask(process: subprocess.Popen[bytes], request: Line) -> None:
    assert process.stdin is not None
    process.stdin.write(ndjson(request))
    process.stdin.flush()


def answer(process: subprocess.Popen[bytes]) -> Line:
    """The next line; it must come without any further input."""
    assert process.stdout is not None
    found, _, _ = select.select([process.stdout], [], [], 60)
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
    assert (answer(coprocess)["type"], coprocess.wait(60)) == ("result", 3)


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
    done = subprocess.run(["bash", "-c", script], env=variables, capture_output=True, timeout=120)
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line.get("id", line["type"]) for line in told] == ["1", "2", "result"], done.stderr
    assert told[-1]["ok"] is True


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_commits_what_is_said(
    coprocess: subprocess.Popen[bytes], signum: signal.Signals, environment: dict[str, str]
) -> None:
    for request in (prefill("a"), prefill("b")):
        ask(coprocess, request)
    before = {line["agent"]: line for line in (answer(coprocess), answer(coprocess))}
    for request in (
        chat("1", "a", max_tokens=100_000),
        chat("2", "b", max_tokens=100_000),
        chat("3", "a"),
        chat("4", "b", after=["nobody"]),
    ):
        ask(coprocess, request)
    time.sleep(1)
    coprocess.send_signal(signum)
    told = {line["id"]: line for line in (answer(coprocess) for _ in range(4))}
    assert {line["state"] for line in told.values()} == {"interrupted"}
    assert {line["exit"] for line in told.values()} == {128 + signum}
    assert (answer(coprocess)["interrupted"], coprocess.wait(60)) == (4, -signum)
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
    assert coprocess.wait(60) == -signal.SIGPIPE
    assert Store.open(Path(environment["AMEM_STORE"]), ACTOR).resolve(Ref("a")).manifest.op == "chat"


def test_a_terminal_shows_a_table_and_lines_stay_whole(model: Path, environment: dict[str, str]) -> None:
    """Standard error is a terminal; standard output is a pipe, or that terminal as well."""
    path = Path(environment["HOME"], "turns.jsonl")
    path.write_bytes(ndjson(prefill("talker"), chat("1", "talker", max_tokens=400), chat("2", "talker")))
    command = [sys.executable, "-m", "amem_cli", "batch", str(path), "--model", str(model)]
    for shared in (False, True):
        leader, follower = pty.openpty()
        output = follower if shared else subprocess.PIPE
        with subprocess.Popen(command, env={**environment, "TERM": "xterm"}, stdout=output, stderr=follower) as process:
            os.close(follower)
            shown = read_all(leader)
            piped = process.stdout.read() if process.stdout else b""
        assert process.returncode == (0 if not shared else 0)
        assert b"TOKENS/S" in shown and b"talker" in shown
        whole = [line for line in (shown if shared else piped).splitlines() if line.startswith(b'{"type":"result"')]
        assert len(whole) == 1 and json.loads(whole[0])["done"] == 3
        assert shared or all(json.loads(line) for line in piped.splitlines())


def read_all(descriptor: int) -> bytes:
    """What a terminal shows until its last writer is gone."""
    shown = b""
    try:
        while data := os.read(descriptor, 65536):
            shown += data
    except OSError:  # how Linux says that nobody has it open any more
        pass
    os.close(descriptor)
    return shown
