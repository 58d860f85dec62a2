"""`amem batch` as a script drives it: streams both ways, signals, closed pipes and terminals."""

import json
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.naming import Ref
from kvstore.store import Store
from tests.commands.conftest import ACTOR
from tests.support.running import children
from tests.support.running.amem import COMMAND
from tests.support.running.requests import Line, chat, ndjson, prefill
from tests.support.running.terminal import Terminal

pytestmark = pytest.mark.long


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
    told = [json.loads(line) for line in done.stdout.split("\n") if line]
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
