"""`amem`, run in this process or in one of its own, with the same outcome.

A process of its own takes seconds to import MLX. In this one only what a process itself does is missing: it cannot die
of a signal, its streams are files, and modules are imported already.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any, Protocol

from amem_cli.__main__ import run as entry_point
from tests.support.running import children

Done = subprocess.CompletedProcess[str]
COMMAND = (sys.executable, "-m", "amem_cli")


class Amem(Protocol):
    """Runs `amem` with these arguments; `stdin` None is empty."""

    def __call__(self, *arguments: str, stdin: bytes | None = None, env: dict[str, str] | None = None) -> Done: ...


def lines(done: Done) -> list[dict[str, Any]]:
    """The JSON objects of standard output; every line must be one. Text in them may hold other line separators."""
    return [json.loads(line) for line in done.stdout.split("\n") if line]


def in_own_process(*arguments: str, stdin: bytes, env: Mapping[str, str], cwd: Path) -> Done:
    """Run `amem` as a shell does."""
    return children.run(*COMMAND, *arguments, stdin=stdin, env=env, cwd=cwd)


def in_this_process(*arguments: str, stdin: bytes, env: Mapping[str, str], cwd: Path) -> Done:
    """Run `amem` from its entry point on, with this process's streams, environment and folder replaced meanwhile."""
    with streams(stdin) as (out, err), _surroundings(env, cwd), _arguments(arguments):
        code = _exit_code()
        written = [_content(file) for file in (out, err)]
    return subprocess.CompletedProcess(("amem", *arguments), code, *written)


@contextmanager
def streams(stdin: bytes = b"") -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Replace this process's standard streams: input holds `stdin`. Yields the files of output and error."""
    with ExitStack() as stack:
        given, out, err = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
        given.write(stdin)
        given.seek(0)
        stack.enter_context(_standing_in(given, out, err))
        yield out, err


def _exit_code() -> int:
    try:
        entry_point()
    except SystemExit as ended:
        code = ended.code
        assert code is None or isinstance(code, int), code
        return code or 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _content(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


@contextmanager
def _standing_in(given: IO[bytes], out: IO[bytes], err: IO[bytes]) -> Iterator[None]:
    """Have the three files as standard streams, encoded as a new process would have them."""
    names = ("stdin", "stdout", "stderr", "__stdout__")  # the width of a terminal is that of __stdout__
    before = {name: getattr(sys, name) for name in names}
    sys.stdin, sys.stdout, sys.stderr = (TextIOWrapper(file) for file in (given, out, err))
    sys.__stdout__ = sys.stdout  # type: ignore[misc]
    try:
        yield
    finally:
        replaced = (sys.stdin, sys.stdout, sys.stderr)
        for name, stream in before.items():
            setattr(sys, name, stream)
        for stream in replaced:
            stream.detach()


@contextmanager
def _surroundings(env: Mapping[str, str], cwd: Path) -> Iterator[None]:
    """Have this environment, its time zone, and this current folder."""
    variables, folder, mask = dict(os.environ), Path.cwd(), os.umask(0o022)
    os.umask(mask)
    try:
        _set_environment(env)
        os.chdir(cwd)
        yield
    finally:
        os.chdir(folder)
        os.umask(mask)
        _set_environment(variables)


def _set_environment(variables: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)
    time.tzset()


@contextmanager
def _arguments(arguments: tuple[str, ...]) -> Iterator[None]:
    before = sys.argv
    sys.argv = ["amem", *arguments]
    try:
        yield
    finally:
        sys.argv = before
