"""Changes of a store that are killed at, and failed at, every mutation of the file system in turn.

Run as a module, it makes one such series: `python -m tests.support.faults.scenarios NAME BASE OUT` copies BASE to
OUT/0, OUT/1, ... and kills the change in OUT/n at mutation n, until one runs through.
"""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from kvstore.disk import files
from kvstore.lifecycle import fork, restore, snapshot
from kvstore.naming import parse_ref
from kvstore.store import Store
from tests.support.making import ACTOR, commit

FIRST = list(range(300))
SECOND = list(range(600))


def prepare(name: str, root: Path) -> None:
    """The store before the change `name`."""
    if name == "first":
        return
    store = Store.open_or_create(root, ACTOR)
    commit(store, "a", FIRST)
    if name == "restore":
        commit(store, "a", SECOND)


def change(name: str, root: Path) -> None:
    """The change itself."""
    store = Store.open_or_create(root, ACTOR)
    if name == "first":
        commit(store, "a", FIRST)
    elif name == "turn":
        commit(store, "a", SECOND)
    elif name == "fork":
        fork(store, parse_ref("a"), "b")
    elif name == "snapshot":
        snapshot(store, parse_ref("a"), "n")
    elif name == "restore":
        restore(store, parse_ref("a~1"), wait=0)


NAMES = ("first", "turn", "fork", "snapshot", "restore")


def at_mutation(number: int, act: Callable[[str], None]) -> Callable[[str, Path], None]:
    """A fault that calls `act` with the step at the mutation of that number, and at all that follow."""
    left = number

    def fault(step: str, _: Path) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            act(step)

    return fault


def _kill(_: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _killed(name: str, root: Path, number: int) -> bool:
    child = os.fork()
    if not child:
        files.fault = at_mutation(number, _kill)
        change(name, root)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        sys.exit(f"{name} failed by itself")
    return os.WIFSIGNALED(status)


def main(name: str, base: Path, out: Path) -> None:
    number = 0
    while True:
        root = out / str(number)
        shutil.copytree(base, root)
        if not _killed(name, root, number):
            return
        number += 1


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
