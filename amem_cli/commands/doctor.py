"""`amem doctor`: check this machine and this store, and suggest improvements. Writes nothing."""

import fcntl
import json
import os
import platform
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import typer

from amem_cli import __version__
from amem_cli.shell.options import Call, command, new_app
from amem_cli.shell.output import counted, human_size, local_time
from kvstore.errors import AmemError

app = new_app()

_LITTLE_SPACE = 1_000_000_000  # bytes: a few long agents
_TRY_MLX = "import amem_cli.engine, mlx.core as mx; print(mx.default_device().type.name, mx.sum(mx.ones(8)).item())"


@dataclass(frozen=True)
class Check:
    """One result; `fail` means that something does not work."""

    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    hint: str | None = None


@command(app)
def doctor(call: Call) -> None:
    """Check Python, MLX and its BLAS, the store and the models. The exit code is 1 if something does not work."""
    checks = [*_machine(), *_store(call), *_models(call)]
    for check in checks:
        call.out.line("check", **asdict(check))
        call.out.print(f"{check.status:<5} {check.name:<7} {check.detail}")
        if check.hint:
            call.out.print(f"{'':<13} {check.hint}")
    failed = sum(check.status == "fail" for check in checks)
    warned = sum(check.status == "warn" for check in checks)
    call.out.result(call.command, ok=not failed, checks=len(checks), warnings=warned, failures=failed)
    if failed:
        raise typer.Exit(1)


def _machine() -> Iterator[Check]:
    yield Check("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield Check("amem", "ok", __version__)
    yield _mlx()
    yield _blas()


def _mlx() -> Check:
    """Try MLX in a process of its own: a build for another processor would crash this one."""
    try:
        number = version("mlx")
    except PackageNotFoundError:
        return Check("mlx", "fail", "not installed", "pip install 'amem[cpu]', or on a Mac: pip install amem")
    tried = subprocess.run([sys.executable, "-c", _TRY_MLX], capture_output=True, text=True)
    if tried.returncode == 0:
        return Check("mlx", "ok", f"{number} on the {tried.stdout.split()[0]}")
    errors = tried.stderr.strip().splitlines()
    why = errors[-1] if errors else f"exit code {tried.returncode}"
    return Check("mlx", "fail", f"{number} does not work: {why}", "pip install --force-reinstall 'amem[cpu]'")


def _blas() -> Check:
    from amem_cli.engine.backend import blas

    info = blas.preload()
    advice = blas.advice(info)
    detail = f"{info.name} ({info.library})" if info.library else info.name
    return Check("blas", "warn" if advice else "ok", detail, advice)


def _store(call: Call) -> Iterator[Check]:
    if not call.layout.format.exists():
        yield Check("store", "warn", f"no store at {call.root}", "the first `amem prefill` creates it")
        return
    try:
        agents = len(call.open_store().agents())
    except AmemError as error:
        yield Check("store", "fail", error.message, error.hint)
        return
    yield Check("store", "ok", f"{call.root}, {counted(agents, 'agent')}")
    if not os.access(call.root, os.W_OK):
        yield Check("store", "warn", f"{call.root} is read-only", "commands that write will fail")
    free = shutil.disk_usage(call.root).free
    low = "free some space; `amem inspect` shows what agents take" if free < _LITTLE_SPACE else None
    yield Check("disk", "warn" if low else "ok", f"{human_size(free)} free", low)
    mode = stat.S_IMODE(call.root.stat().st_mode)
    if mode & 0o077:
        hint = f"chmod 700 {call.root}: it holds conversations"
        yield Check("store", "warn", f"other users can read {call.root} (mode {mode:04o})", hint)
    yield from map(_held, _holders(call.layout.locks))


def _holders(locks: Path) -> Iterator[dict[str, str]]:
    """The contents of every lock that a process holds now."""
    for path in sorted(locks.iterdir()):
        with path.open("rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                try:
                    yield json.loads(lock.read())
                except ValueError:  # being written right now
                    continue


def _held(holder: dict[str, str]) -> Check:
    since = local_time(holder["since"])
    return Check("busy", "ok", f"process {holder['pid']} ({holder['command']}) holds a lock since {since}")


def _models(call: Call) -> Iterator[Check]:
    from amem_cli.engine.models import registry

    try:
        entries = registry.entries(call.layout)
    except AmemError as error:
        yield Check("models", "fail", error.message, error.hint)
        return
    if not entries:
        yield Check("models", "warn", "no models registered", "add one with `amem model add NAME SOURCE`")
    for entry in entries:
        missing = entry.kind in ("folder", "gguf") and not Path(entry.source).exists()
        hint = f"its source is missing: restore it, or run `amem model rm {entry.name}`" if missing else None
        yield Check("model", "warn" if missing else "ok", f"{entry.name}: {entry.source}", hint)
