"""Processes that tests start. Each has the default signals and a group of its own, and none outlives its test."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

LIMIT = 300.0
"""Seconds that anything may take on a slow and busy machine. Only what hangs takes longer."""

Argument = str | bytes | Path
_started: list[subprocess.Popen[bytes]] = []


def start(*command: Argument, **options: Any) -> subprocess.Popen[bytes]:
    """Start a process as `subprocess.Popen` does; its standard input is empty unless `options` say otherwise."""
    options = {"stdin": subprocess.DEVNULL, "start_new_session": True, **options}
    process: subprocess.Popen[bytes] = subprocess.Popen(command, **options)
    _started.append(process)
    return process


def run(
    *command: Argument,
    stdin: bytes | int = b"",
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    check: bool = False,
    **streams: int,
) -> subprocess.CompletedProcess[str]:
    """Run a process to its end. `stdin` is what it reads, or a descriptor; what it writes is UTF-8.

    `check` raises CalledProcessError where it fails.
    """
    given, source = (stdin, subprocess.PIPE) if isinstance(stdin, bytes) else (None, stdin)
    pipes = {"stdin": source, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    process = start(*command, env=env, cwd=cwd, **pipes)
    written = [(data or b"").decode() for data in process.communicate(given, timeout=LIMIT)]
    _started.remove(process)
    done = subprocess.CompletedProcess(command, process.returncode, *written)
    if check and done.returncode:
        error = subprocess.CalledProcessError(done.returncode, command, *written)
        error.add_note(done.stderr)
        raise error
    return done


def kill_all() -> None:
    """Kill what was started and is not over, each process with its group."""
    while _started:
        process = _started.pop()
        with suppress(ProcessLookupError, PermissionError):  # PermissionError: a group of zombies on macOS
            os.killpg(process.pid, signal.SIGKILL)
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with suppress(BrokenPipeError):  # what was not written yet
                    pipe.close()
        process.wait()


def wait_until(reached: Callable[[], object]) -> None:
    """Wait until something holds. Raises AssertionError when it takes too long."""
    deadline = time.monotonic() + LIMIT
    while not reached():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def unignore(signums: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)) -> None:
    """Let children have the default for signals that this process ignores, as under `nohup` or in the background.

    What is ignored stays so in a child, but what has a handler is reset. This process still does nothing on them.
    """
    for signum in signums:
        if signal.getsignal(signum) is signal.SIG_IGN:
            signal.signal(signum, _nothing)


def _nothing(_signum: int, _frame: FrameType | None) -> None:
    pass
