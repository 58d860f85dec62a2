"""What the tests themselves rest on: processes that end with their test, and `amem` run in this process."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.store import Store
from tests.commands.conftest import ACTOR, put_state
from tests.support.running import children, memory
from tests.support.running.amem import Done, in_own_process, in_this_process

ROOT = Path(__file__).parents[2]
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider")
IGNORING = "trap '' INT QUIT HUP; exec \"$@\""  # as nohup and a shell's background jobs do


def ignoring(*command: str) -> Done:
    """Run a command that begins with signals ignored."""
    return children.run("sh", "-c", IGNORING, "sh", *command, cwd=ROOT)


@pytest.mark.long
def test_signals_are_tested_where_they_are_ignored() -> None:
    tests = ("test_a_signal_ends_the_answer_commits_it_and_kills", "test_a_signal_that_was_ignored_stays_ignored")
    done = ignoring(*PYTEST, *(f"tests/commands/test_turns.py::{test}" for test in tests))
    assert done.returncode == 0 and "4 passed" in done.stdout, done.stdout


FAILS = """
import subprocess
from tests.support.running import children

def test_fails():
    script = "exec 9>{pipe}; echo begun >&9; echo begun; sleep 1000 & sleep 1000"
    process = children.start("sh", "-c", script, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"never"
"""


@pytest.mark.long
def test_a_test_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    """A child and its own child hold a pipe open for writing: it is at its end when both are gone."""
    pipe, test = tmp_path / "pipe", tmp_path / "test_fails.py"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    test.write_text(FAILS.format(pipe=pipe))
    settings = ("-p", "tests.conftest", "--rootdir", ROOT, "-c", ROOT / "pyproject.toml")
    running = children.start(*PYTEST, *settings, test, cwd=ROOT, stdout=subprocess.PIPE)
    out, _ = running.communicate(timeout=children.LIMIT)
    assert running.returncode == 1 and b"1 failed" in out, out
    assert os.read(reader, 100) == b"begun\n"
    children.wait_until(lambda: at_end(reader))
    os.close(reader)
    assert not list(memory.FOLDER.glob(f"{memory.PREFIX}{running.pid}-*"))


def at_end(reader: int) -> bool:
    """Whether nobody has the pipe open for writing any more."""
    try:
        return os.read(reader, 1) == b""
    except BlockingIOError:
        return False


def test_children_have_the_default_signals() -> None:
    done = ignoring(sys.executable, "-c", DISPOSITIONS)
    assert done.stdout.split() == ["True", "True", "False", "False"], done.stderr


DISPOSITIONS = """
import signal, subprocess, sys
from tests.support.running import children
show = "import signal; print(*[signal.getsignal(s) is signal.SIG_IGN for s in (signal.SIGINT, signal.SIGHUP)])"
subprocess.run([sys.executable, "-c", show])
children.unignore()
subprocess.run([sys.executable, "-c", show])
"""


def run_both(folder: Path, *arguments: str, stdin: bytes = b"") -> tuple[Done, Done]:
    """Run `amem` in this process and in one of its own, each on a copy of the same store."""
    ended = []
    for run in (in_this_process, in_own_process):
        home = folder / run.__name__
        home.mkdir()
        store = Store.open_or_create(home / "store", ACTOR)
        put_state(store, "a", range(300))
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("AMEM_", "XDG_"))}
        env = {**kept, "HOME": str(home), "AMEM_STORE": "store", "TZ": "Asia/Kolkata", "COLUMNS": "70"}
        ended.append(run(*arguments, stdin=stdin, env=env, cwd=home))
    return ended[0], ended[1]


@pytest.mark.parametrize(
    ("arguments", "stdin"),
    [
        (("--version",), b""),
        (("--help",), b""),
        (("inspect", "--json", "--nope"), b""),
        (("snapshot", "a", "s"), b""),
        (("chat", "nobody", "h\udcff"), b""),
        (("prefill", "b", "-"), b"\xff"),
        (("--json", "prefill", "b", "none\udcff.txt"), b""),
        (("batch", "-"), b'{"op":"chat"}\nno json\n'),
        (("__complete", "agents", ""), b""),
    ],
    ids=lambda value: " ".join(value).encode("ascii", "replace").decode() if isinstance(value, tuple) else "",
)
def test_in_this_process_amem_ends_as_in_its_own(tmp_path: Path, arguments: tuple[str, ...], stdin: bytes) -> None:
    here, there = run_both(tmp_path, *arguments, stdin=stdin)
    assert outcome(here) == outcome(there)


def outcome(done: Done) -> tuple[int, str, str]:
    """How a command ended, and what it said, but for how long it took."""
    return done.returncode, re.sub(r'"seconds":[^,}]*', "", done.stdout), done.stderr


def test_amem_in_this_process_changes_nothing_of_it(tmp_path: Path) -> None:
    def state() -> tuple[object, ...]:
        handlers = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
        streams = (sys.stdin, sys.stdout, sys.stderr, sys.__stdout__)
        return (dict(os.environ), Path.cwd(), sys.argv, *streams, *handlers)

    before = state()
    env = {"AMEM_STORE": str(tmp_path / "store"), "TZ": "Asia/Kolkata"}
    assert in_this_process("batch", "-", stdin=b"", env=env, cwd=tmp_path).returncode == 0
    assert in_this_process("nope", stdin=b"", env=env, cwd=tmp_path).returncode == 2
    assert state() == before
