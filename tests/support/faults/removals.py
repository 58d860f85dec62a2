"""Removals that are killed at every mutation in turn.

`python -m tests.support.faults.removals NAME OUT` fills OUT/1, OUT/2, ...
"""

import os
import shutil
import signal
import sys
from pathlib import Path

from kvstore.disk import files
from kvstore.lifecycle import fork, snapshot
from kvstore.naming import Ref, parse_ref
from kvstore.remove.remove import remove, remove_domain
from kvstore.store import Store
from tests.support.faults.scenarios import at_mutation
from tests.support.making import ACTOR, commit


def prepare(root: Path) -> None:
    store = Store.open_or_create(root, ACTOR)
    commit(store, "a", range(600), store.create_domain("team"))
    snapshot(store, Ref("a"), "s")
    fork(store, Ref("a"), "b")
    commit(store, "a", range(800))


def change(name: str, root: Path) -> None:
    store = Store.open(root, ACTOR)
    if name == "rm-domain":
        remove_domain(store, "team", wait=0)
    elif name == "erase-snapshot":
        remove(store, parse_ref("a@s"), wait=0, erase=True)
    else:
        remove(store, Ref("a"), wait=0, erase=name == "erase")


def killed(name: str, root: Path, number: int) -> bool:
    child = os.fork()
    if not child:
        files.fault = at_mutation(number, lambda _: os.kill(os.getpid(), signal.SIGKILL))
        change(name, root)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        sys.exit(f"{name} failed by itself")
    return os.WIFSIGNALED(status)


def main(name: str, out: Path) -> None:
    base = out / "0"
    prepare(base)
    number = 1
    while True:
        root = out / str(number)
        shutil.copytree(base, root)
        if not killed(name, root, number - 1):
            return
        number += 1


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
