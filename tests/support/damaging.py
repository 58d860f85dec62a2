"""A store to be damaged, the ways to damage it, and what verify finds then."""

from collections.abc import Callable
from pathlib import Path

from kvstore.format.kinds import BLOCK, MANIFEST, PAGE, TAIL
from kvstore.lifecycle import fork, snapshot
from kvstore.naming import parse_ref
from kvstore.store import Store
from kvstore.verify.checks import Checks
from kvstore.verify.findings import Finding
from kvstore.verify.verify import verify
from tests.support.making import commit

A, B = (list(range(start, start + 1200)) for start in (0, 5000))
DEEP, QUICK = Checks("deep"), Checks("quick", isolation=False)


def fill(store: Store) -> Store:
    """Make agents `a` (two states and a snapshot), its fork `b`, and `c` in a domain of its own."""
    commit(store, "a", A[:600])
    snapshot(store, parse_ref("a"), "s", note="why")
    commit(store, "a", A)
    fork(store, parse_ref("a"), "b")
    commit(store, "c", B)
    return store


def found(store: Store, checks: Checks = DEEP) -> list[Finding]:
    return list(verify(store, checks).findings)


def only(store: Store, checks: Checks = DEEP) -> Finding:
    [finding] = found(store, checks)
    return finding


def path_of(store: Store, kind: str, agent: str = "a") -> Path:
    """A file of that kind that the agent's head needs."""
    state = store.resolve(parse_ref(agent))
    domain = state.agent.domain
    if kind == "manifests":
        return store.layout.object(domain, MANIFEST, state.digest)
    if kind == "pages":
        return store.layout.object(domain, PAGE, state.manifest.pages[0].sha256)
    if kind == "tails":
        assert state.manifest.tail
        return store.layout.object(domain, TAIL, state.manifest.tail.sha256)
    return store.layout.object(domain, BLOCK, store.blocks(state.manifest)[-1].sha256)


KINDS = ("manifests", "pages", "tails", "blocks")


def damage(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Change a file in place, and leave its mode as it was."""
    mode = path.stat().st_mode
    path.chmod(0o600)
    path.write_bytes(change(path.read_bytes()))
    path.chmod(mode)


def flip(data: bytes, place: int | None = None) -> bytes:
    at = len(data) * 2 // 3 if place is None else place
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
