"""Runs `amem` commands, each in a process of its own, as from a shell."""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from amem_cli.shell import signals
from amem_cli.shell.output import Output
from kvstore.errors import AmemError

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 20.0  # a prefill commits its progress before it ends


@dataclass(frozen=True)
class Ran:
    """A command that succeeded: its process id, and the objects that it wrote with `--json`."""

    pid: int
    lines: tuple[dict[str, Any], ...]

    @property
    def result(self) -> dict[str, Any]:
        return self.lines[-1]


@dataclass(frozen=True)
class Runner:
    """Runs commands in a folder on a store, until a signal stops them."""

    folder: Path
    store: Path
    out: Output
    stop: signals.Stop
    warned: set[str] = field(default_factory=set)

    def run(self, *arguments: str, live: bool = False) -> Ran:
        """Print a command line and run it. Each warning is shown once; `live` shows the progress of the command.

        Raises the AmemError that the command ended with, and KeyboardInterrupt after a signal.
        """
        self.out.print(f"$ {shlex.join(('amem', *arguments))}")
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "amem_cli", *arguments],
            cwd=self.folder,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=None if live else subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        written, warnings = self._wait(process)
        lines = tuple(json.loads(line) for line in written.split("\n") if line)
        self.out.line("command", arguments=["amem", *arguments], pid=process.pid, lines=lines)
        if process.returncode:
            raise _failure(arguments[0], process.returncode, lines)
        self._warn(warnings or "")
        return Ran(process.pid, lines)

    def _environment(self) -> Mapping[str, str]:
        """The user's environment without amem's settings, so that the demo is always the same."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("AMEM_")}
        own = {"AMEM_STORE": str(self.store), "AMEM_JSON": "1", "AMEM_CONFIG": os.devnull}
        own |= {"AMEM_QUIET": "1"} if self.out.quiet else {}
        own |= {} if self.out.color else {"NO_COLOR": "1"}
        return kept | own

    def _warn(self, warnings: str) -> None:
        for line in warnings.splitlines():
            if line not in self.warned:
                self.warned.add(line)
                self.out.warn(line.removeprefix("amem: "))

    def _wait(self, process: subprocess.Popen[str]) -> tuple[str, str | None]:
        """Wait for a process; its standard output and, unless it is live, its standard error."""
        while not self.stop():
            try:
                return process.communicate(timeout=_POLL_SECONDS)
            except subprocess.TimeoutExpired:
                continue
        _end(process)
        raise KeyboardInterrupt


def _end(process: subprocess.Popen[str]) -> None:
    """Terminate a process, which commits first. A second Ctrl-C must not keep the folder from being removed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    process.terminate()
    try:
        process.communicate(timeout=_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def _failure(name: str, code: int, lines: tuple[dict[str, Any], ...]) -> AmemError:
    """The error that a command ended with."""
    last = lines[-1] if lines else {}
    kinds: list[type[AmemError]] = [AmemError, *AmemError.__subclasses__()]
    for kind in kinds:
        if last.get("code") == kind.code:
            return kind(last["message"], last["hint"])
    how = f"died of signal {-code}" if code < 0 else f"ended with {code}"
    return AmemError(f"`amem {name}` {how}", "`amem doctor` checks the machine")
