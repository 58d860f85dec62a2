"""Read every file that an agent leads to, and check it. The first fault is raised, so what returns is whole."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore import files
from kvstore.block import damaged
from kvstore.history import reachable
from kvstore.manifest import Manifest
from kvstore.shapes import Part, block_parts, tail_parts
from kvstore.store import Store

_Sizes = dict[Path, int]  # every file that was read, once → bytes


@dataclass(frozen=True)
class Audit:
    """How many files were read and found whole, and their bytes; a file that several states share counts once."""

    files: int
    bytes: int


def audit(store: Store) -> Audit:
    """Read every manifest, page, block and tail of every agent, its history and its snapshots.

    Each file's SHA-256 is held against its name; a block's and a tail's checksum, parts and domain against the first
    row that lists it. Raises DamageError, IsolationError and NotFoundError at the first that does not agree.
    """
    checked: _Sizes = {}
    for manifest in _states(store, checked):
        _check_state(store, manifest, checked)
    return Audit(len(checked), sum(checked.values()))


def _states(store: Store, checked: _Sizes) -> Iterator[Manifest]:
    """Every kept state of every agent. A head must be there; further back, gc may have taken some."""
    for agent in store.agents():
        snapshots = {snapshot.manifest for snapshot in store.snapshots(agent.name)}
        for digest in sorted(reachable(store, agent) | snapshots | {agent.manifest}):
            if _check_file(store.layout.manifest(agent.domain, digest), checked):
                yield store.manifest(agent.domain, digest)


def _check_state(store: Store, manifest: Manifest, checked: _Sizes) -> None:
    layout, domain = store.layout, manifest.domain
    groups = {group.id: group for group in manifest.groups}
    for page in manifest.pages:
        _check_file(layout.page(domain, page.sha256), checked)
    for row in store.blocks(manifest):
        if _check_file(layout.block(domain, row.sha256), checked):
            parts = block_parts(groups[row.group], manifest.codec)
            store.read_block(domain, row, parts, _buffers(parts))
    if manifest.tail and _check_file(layout.tail(domain, manifest.tail.sha256), checked):
        parts = tail_parts(manifest.groups, manifest.codec, manifest.tail.tokens)
        store.read_tail(manifest, parts, _buffers(parts))


def _check_file(path: Path, checked: _Sizes) -> bool:
    """Hash a file against its name, unless that is done. Returns whether it was not. Raises DamageError."""
    if path in checked:
        return False
    try:
        data = files.read(path)
    except FileNotFoundError as error:
        raise damaged(path, "is missing") from error
    if hashlib.sha256(data).hexdigest() != path.stem:
        raise damaged(path, "is altered: its SHA-256 differs")
    checked[path] = len(data)
    return True


def _buffers(parts: Sequence[Part]) -> list[memoryview]:
    return [memoryview(bytearray(part.nbytes)) for part in parts]
