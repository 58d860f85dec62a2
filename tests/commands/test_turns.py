"""`prefill` and `chat` with a tiny model of random weights: streams, signals, terminals and exit codes."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvstore.naming import Ref, parse_ref
from kvstore.store import Store
from tests.commands.conftest import ACTOR, Amem, lines
from tests.support.tiny import make_tiny_model

RESULT_KEYS = (
    "type command ok agent model domain manifest before tokens reused prefilled generated parted_at load_ms ttft_ms",
    "new_blocks bytes_written seconds complete recomputed",
)
LONG = ("--max-tokens", "100000")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


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
    piped = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    return subprocess.Popen([sys.executable, "-m", "amem_cli", *arguments], env=environment, **piped)  # type: ignore[call-overload, no-any-return]


def first_bytes(process: subprocess.Popen[bytes]) -> bytes:
    """Wait until an answer has begun."""
    assert process.stdout is not None
    return os.read(process.stdout.fileno(), 1)


def wait_for_turn(process: subprocess.Popen[bytes], root: Path, command: str) -> None:
    """Wait until `command` holds its agent and has had a moment to compute."""
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        if any(f'"command":"{command}"' in lock.read_text() for lock in root.glob("locks/agent-*")):
            time.sleep(0.3)
            return
        time.sleep(0.02)


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


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_answer_commits_it_and_kills(
    talker: Store, environment: dict[str, str], signum: signal.Signals
) -> None:
    before = tokens(talker)
    process = start(environment, "chat", "t", "hi", *LONG)
    first_bytes(process)
    process.send_signal(signum)
    rest, errors = process.communicate(timeout=60)
    assert process.returncode == -signum
    assert rest.endswith(b"\n")
    assert b"Traceback" not in errors
    manifest = talker.resolve(Ref("t")).manifest
    assert (manifest.stop, manifest.complete) == ("interrupted", True)
    assert manifest.tokens > before


def test_json_tells_of_the_interruption(talker: Store, environment: dict[str, str]) -> None:
    process = start(environment, "chat", "t", "hi", *LONG, "--json")
    wait_for_turn(process, talker.layout.root, "chat")
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    result = json.loads(out.splitlines()[-1])
    assert process.returncode == -signal.SIGINT
    assert (result["type"], result["ok"], result["finish"]) == ("result", False, "interrupted")


def test_a_closed_standard_output_commits_and_is_silent(talker: Store, environment: dict[str, str]) -> None:
    before = tokens(talker)
    process = start(environment, "chat", "t", "hi", *LONG)
    first_bytes(process)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == -signal.SIGPIPE
    assert b"Traceback" not in errors
    assert tokens(talker) > before


def test_a_loop_in_a_shell_stops(talker: Store, environment: dict[str, str]) -> None:
    loop = f"for i in 1 2 3; do {sys.executable} -m amem_cli chat t hi --max-tokens 100000; echo NEXT; done"
    process = subprocess.Popen(["bash", "-c", loop], env=environment, stdout=subprocess.PIPE, start_new_session=True)
    first_bytes(process)
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert b"NEXT" not in out
    assert tokens(talker) > 0


def test_a_signal_that_was_ignored_stays_ignored(talker: Store, environment: dict[str, str]) -> None:
    command = f"trap '' HUP; exec {sys.executable} -m amem_cli chat t hi --max-tokens 300"
    process = subprocess.Popen(["bash", "-c", command], env=environment, stdout=subprocess.PIPE)
    first_bytes(process)
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert talker.resolve(Ref("t")).manifest.stop == "length"


TWICE = """
import os, signal
from amem_cli import signals
with signals.listening() as stop:
    os.kill(os.getpid(), signal.SIGINT)
    print(stop(), flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    print("still here", flush=True)
"""


def test_a_second_interrupt_kills_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (-signal.SIGINT, b"True\n")


def test_a_prefill_that_was_cut_short_is_finished_by_the_same_command(
    amem: Amem, model: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    text = tmp_path / "long.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 150)
    process = start(environment, "prefill", "p", str(text), "--model", str(model))
    wait_for_turn(process, tmp_path / "store", "prefill")
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT, errors
    assert out == b"p\n"
    assert b"cut short" in errors
    assert amem("chat", "p", "hi").returncode == 5
    done = amem("prefill", "p", str(text), "--json")
    [result] = lines(done)
    assert (done.returncode, result["complete"]) == (0, True)
    assert result["reused"] > 0


class Terminal:
    """A conversation at a terminal."""

    def __init__(self, environment: dict[str, str], *arguments: str) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "amem_cli", *arguments],
            env={**environment, "TERM": "dumb"},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        self.seen = b""

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def wait_for(self, text: bytes) -> None:
        """Read until `text` has come; what was read is then forgotten."""
        while text not in self.seen:
            try:
                data = os.read(self.master, 1 << 16)
            except OSError:  # how Linux tells that the other side is closed
                data = b""
            assert data, self.seen
            self.seen += data
        self.seen = self.seen.partition(text)[2]

    def end(self) -> int:
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()
            os.close(self.master)


def test_a_conversation_at_a_terminal(talker: Store, environment: dict[str, str]) -> None:
    terminal = Terminal(environment, "chat", "t", "--max-tokens", "8")
    for _ in range(2):
        terminal.wait_for(b"> ")
        terminal.type(b"hi\n")
        terminal.wait_for(b"8 generated")
    terminal.wait_for(b"> ")
    terminal.type(b"\x04")
    assert terminal.end() == 0
    assert tokens(talker, "t~2") < tokens(talker, "t~1") < tokens(talker)


def test_ctrl_c_ends_an_answer_and_then_the_conversation(talker: Store, environment: dict[str, str]) -> None:
    terminal = Terminal(environment, "chat", "t", *LONG)
    terminal.wait_for(b"> ")
    terminal.type(b"hi\n")
    terminal.wait_for(b"hi\r\n")
    time.sleep(1)
    terminal.process.send_signal(signal.SIGINT)
    terminal.wait_for(b"generated")
    terminal.wait_for(b"> ")
    assert talker.resolve(Ref("t")).manifest.stop == "interrupted"
    time.sleep(0.5)  # the prompt is shown a moment before `input` waits
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.end() == 0
