"""`prefill` and `chat` with a tiny model of random weights: streams, signals, terminals and exit codes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.naming import Ref, parse_ref
from kvstore.store import Store
from tests.commands.conftest import ACTOR
from tests.support.running import children
from tests.support.running.amem import COMMAND, Amem, lines
from tests.support.running.terminal import Terminal

RESULT_KEYS = (
    "type command ok agent model domain manifest before tokens reused prefilled generated parted_at load_ms ttft_ms",
    "new_blocks bytes_written seconds complete recomputed",
)
LONG = ("--max-tokens", "100000")


@pytest.fixture
def talker(amem: Amem, model: Path, environment: dict[str, str]) -> Store:
    """The store with the agent `t`, whose answers never end by themselves."""
    done = amem("prefill", "t", "--model", str(model), "--system", "Be brief.", stdin=b"hello there\n")
    assert (done.returncode, done.stdout) == (0, "t\n"), done.stderr
    return Store.open(Path(environment["AMEM_STORE"]), ACTOR)


def tokens(store: Store, ref: str = "t") -> int:
    return store.resolve(parse_ref(ref)).manifest.tokens


def start(environment: dict[str, str], *arguments: str, **streams: int) -> subprocess.Popen[bytes]:
    """`amem` running on its own, its streams piped unless said otherwise."""
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    return children.start(*COMMAND, *arguments, env=environment, **piped)


def first_bytes(process: subprocess.Popen[bytes]) -> bytes:
    """Wait until an answer has begun."""
    assert process.stdout is not None
    return os.read(process.stdout.fileno(), 1)


def finish(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """What a process still writes until its end."""
    return process.communicate(timeout=children.LIMIT)


def wait_for_turn(process: subprocess.Popen[bytes], root: Path, command: str) -> None:
    """Wait until `command` holds its agent: from then on a signal ends its turn."""

    def holds() -> bool:
        return any(f'"command":"{command}"' in lock.read_text() for lock in root.glob("locks/agent-*"))

    children.wait_until(lambda: holds() or process.poll() is not None)


def test_a_prefill_again_changes_nothing_and_another_text_is_refused(amem: Amem, talker: Store) -> None:
    head = talker.agent("t").manifest
    same = amem("prefill", "t", "-", "--system", "Be brief.", "--json", stdin=b"hello there")
    [result] = lines(same)
    assert (same.returncode, result["prefilled"], result["manifest"]) == (0, 0, f"sha256:{head}")
    assert " ".join(result) == " ".join(RESULT_KEYS)
    other = amem("prefill", "t", "-", "--system", "Be brief.", stdin=b"hello here")
    assert (other.returncode, talker.agent("t").manifest) == (5, head)
    replaced = amem("prefill", "t", "-", "--system", "Be brief.", "--replace", "--json", stdin=b"hello here")
    assert replaced.returncode == 0
    assert lines(replaced)[-1]["parted_at"] > 0


def test_a_system_text_alone_makes_an_agent(amem: Amem, model: Path, tmp_path: Path) -> None:
    (tmp_path / "system.txt").write_text("Be brief.\n")
    done = amem("prefill", "s", "--system-file", "system.txt", "--model", str(model), "--json")
    assert (done.returncode, lines(done)[-1]["agent"]) == (0, "s")


def test_an_answer_and_a_newline_and_nothing_else(amem: Amem, talker: Store) -> None:
    before = tokens(talker)
    head = talker.agent("t").manifest
    tried = amem("--json", "chat", "t", "hi", "--max-tokens", "8", "--no-save")
    [result] = lines(tried)
    assert " ".join(result) == " ".join((*RESULT_KEYS, "text finish seed temp"))
    assert (result["generated"], result["finish"], result["manifest"]) == (8, "length", None)
    assert talker.agent("t").manifest == head
    said = amem("chat", "t", "hi", "--max-tokens", "8", "--expect", f"sha256:{head}")
    assert (said.returncode, said.stdout) == (0, result["text"] + "\n")
    assert "first token in" in said.stderr
    assert tokens(talker) == result["tokens"] > before
    again = amem("--json", "-q", "chat", "t", "hi", "--max-tokens", "1")
    assert (again.stderr, lines(again)[-1]["reused"]) == ("", tokens(talker, "t~1") - 1)
    assert amem("chat", "t", "hi", "--expect", f"sha256:{head}").returncode == 5


@pytest.mark.long
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_answer_commits_it_and_kills(
    talker: Store, environment: dict[str, str], signum: signal.Signals
) -> None:
    before = tokens(talker)
    process = start(environment, "chat", "t", "hi", *LONG)
    first_bytes(process)
    process.send_signal(signum)
    rest, errors = finish(process)
    assert process.returncode == -signum
    assert rest.endswith(b"\n")
    assert b"Traceback" not in errors
    manifest = talker.resolve(Ref("t")).manifest
    assert (manifest.stop, manifest.complete) == ("interrupted", True)
    assert manifest.tokens > before


@pytest.mark.long
def test_json_tells_of_the_interruption(talker: Store, environment: dict[str, str]) -> None:
    process = start(environment, "chat", "t", "hi", *LONG, "--json")
    wait_for_turn(process, talker.layout.root, "chat")
    process.send_signal(signal.SIGINT)
    out, _ = finish(process)
    result = json.loads(out.splitlines()[-1])
    assert process.returncode == -signal.SIGINT
    assert (result["type"], result["ok"], result["finish"]) == ("result", False, "interrupted")


@pytest.mark.long
def test_a_closed_standard_output_commits_and_is_silent(talker: Store, environment: dict[str, str]) -> None:
    before = tokens(talker)
    process = start(environment, "chat", "t", "hi", *LONG)
    first_bytes(process)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(children.LIMIT) == -signal.SIGPIPE
    assert b"Traceback" not in errors
    assert tokens(talker) > before


@pytest.mark.long
def test_a_loop_in_a_shell_stops(talker: Store, environment: dict[str, str]) -> None:
    loop = f"for i in 1 2 3; do {sys.executable} -m amem_cli chat t hi --max-tokens 100000; echo NEXT; done"
    process = children.start("bash", "-c", loop, env=environment, stdout=subprocess.PIPE)
    first_bytes(process)
    os.killpg(process.pid, signal.SIGINT)
    out, _ = finish(process)
    assert process.returncode == -signal.SIGINT
    assert b"NEXT" not in out
    assert tokens(talker) > 0


@pytest.mark.long
def test_a_signal_that_was_ignored_stays_ignored(talker: Store, environment: dict[str, str]) -> None:
    command = f"trap '' HUP; exec {sys.executable} -m amem_cli chat t hi --max-tokens 300"
    process = children.start("bash", "-c", command, env=environment, stdout=subprocess.PIPE)
    first_bytes(process)
    process.send_signal(signal.SIGHUP)
    finish(process)
    assert process.returncode == 0
    assert talker.resolve(Ref("t")).manifest.stop == "length"


TWICE = """
import os, signal
from amem_cli.shell import signals
with signals.listening() as stop:
    os.kill(os.getpid(), signal.SIGINT)
    print(stop(), flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    print("still here", flush=True)
"""


def test_a_second_interrupt_kills_at_once() -> None:
    done = children.run(sys.executable, "-c", TWICE)
    assert (done.returncode, done.stdout) == (-signal.SIGINT, "True\n")


@pytest.mark.long
def test_a_prefill_that_was_cut_short_is_finished_by_the_same_command(
    amem: Amem, model: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    text = tmp_path / "long.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 150)
    with Terminal() as terminal:
        process = start(environment, "prefill", "p", str(text), "--model", str(model), stderr=terminal.device)
        terminal.hand_over()
        terminal.wait_for(b"prefill")  # its progress: something is computed
        process.send_signal(signal.SIGINT)
        out, _ = finish(process)
        errors = terminal.rest()
    assert process.returncode == -signal.SIGINT, errors
    assert out == b"p\n"
    assert b"was interrupted" in errors
    assert amem("chat", "p", "hi").returncode == 5
    done = amem("prefill", "p", str(text), "--json")
    [result] = lines(done)
    assert (done.returncode, result["complete"]) == (0, True)
    assert result["reused"] > 0


def talk(terminal: Terminal, environment: dict[str, str], *arguments: str) -> subprocess.Popen[bytes]:
    """A conversation at a terminal."""
    device = terminal.device
    env = {**environment, "TERM": "dumb"}
    process = children.start(*COMMAND, *arguments, env=env, stdin=device, stdout=device, stderr=device)
    terminal.hand_over()
    return process


@pytest.mark.long
def test_a_conversation_at_a_terminal(talker: Store, environment: dict[str, str]) -> None:
    with Terminal() as terminal:
        process = talk(terminal, environment, "chat", "t", "--max-tokens", "8")
        for _ in range(2):
            terminal.wait_for(b"> ")
            terminal.type(b"hi\n")
            terminal.wait_for(b"8 generated")
        terminal.wait_for(b"> ")
        terminal.type(b"\x04")
        assert process.wait(children.LIMIT) == 0
    assert tokens(talker, "t~2") < tokens(talker, "t~1") < tokens(talker)


@pytest.mark.long
def test_ctrl_c_ends_an_answer_and_then_the_conversation(talker: Store, environment: dict[str, str]) -> None:
    with Terminal() as terminal:
        process = talk(terminal, environment, "chat", "t", *LONG)
        terminal.wait_for(b"> ")
        terminal.type(b"hi\n")
        terminal.wait_for(b"hi\r\n")
        terminal.wait_for(b".")
        process.send_signal(signal.SIGINT)
        terminal.wait_for(b"generated")
        terminal.wait_for(b"> ")
        assert talker.resolve(Ref("t")).manifest.stop == "interrupted"
        children.wait_until(lambda: sleeping(process))  # the prompt is shown a moment before it waits for keys
        process.send_signal(signal.SIGINT)
        assert process.wait(children.LIMIT) == 0


def sleeping(process: subprocess.Popen[bytes]) -> bool:
    """Whether a process waits for something."""
    return children.run("ps", "-o", "state=", "-p", str(process.pid)).stdout.startswith("S")
