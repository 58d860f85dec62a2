"""What the states of a store take on disk, and what they share with others."""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from amem_cli.output import digest
from kvstore.errors import DamageError
from kvstore.journal import read_journal
from kvstore.manifest import Manifest, encode
from kvstore.refs import AgentRef
from kvstore.shapes import LayerGroup, bytes_per_token, fp16_bytes_per_token
from kvstore.store import Store


class FileUse(NamedTuple):
    """A file that a state needs."""

    bytes: int
    is_block: bool


Files = dict[tuple[str, str], FileUse]  # by domain id and SHA-256


@dataclass(frozen=True)
class AgentUsage:
    """One agent as `inspect` tells it. Bytes are those of every file that its head needs, blocks or not."""

    name: str
    id: str
    domain: str
    model: str
    head: str | None
    parent: str | None  # the state before the head; after a fork, the state that it continues
    note: str | None  # of the restore or fork that made the head
    tokens: int
    blocks: int
    bytes: int
    own_bytes: int  # of files that no other agent's head or snapshot needs
    shared_bytes: int
    snapshots: int
    complete: bool
    created: str
    updated: str


def files_of(store: Store, domain: str, head: str) -> Files:
    """Every file that the state `head` needs: its manifest, pages, blocks and tail."""
    manifest = store.manifest(domain, head)
    files = {(domain, head): FileUse(len(encode(manifest)), is_block=False)}
    for row in (*manifest.pages, *([manifest.tail] if manifest.tail else [])):
        files[domain, row.sha256] = FileUse(row.bytes, is_block=False)
    for block in store.blocks(manifest):
        files[domain, block.sha256] = FileUse(block.bytes, is_block=True)
    return files


def total_bytes(files: Files) -> int:
    return sum(file.bytes for file in files.values())


def total_blocks(files: Files) -> int:
    return sum(file.is_block for file in files.values())


def agent_files(store: Store, agent: AgentRef) -> Files:
    """Every file that the agent's head and its snapshots need."""
    files = files_of(store, agent.domain, agent.manifest)
    for snapshot in store.snapshots(agent.name):
        files |= files_of(store, snapshot.domain, snapshot.manifest)
    return files


def head_notes(store: Store) -> dict[str, str]:
    """What `--note` said of states, by their digest. A damaged journal keeps nobody from looking at agents."""
    notes: dict[str, str] = {}
    with suppress(DamageError):
        for entry in read_journal(store.layout.journal):
            if entry.change.after and entry.change.note:
                notes[entry.change.after] = entry.change.note
    return notes


def measure(store: Store, agents: Sequence[AgentRef]) -> tuple[list[AgentUsage], Files]:
    """All agents' usage, and the files of them all, each counted once."""
    needed = {agent.id: agent_files(store, agent) for agent in agents}
    users = Counter(key for files in needed.values() for key in files)
    everything: Files = {}
    for files in needed.values():
        everything |= files
    notes = head_notes(store)
    return [_measure_one(store, agent, users, notes.get(agent.manifest)) for agent in agents], everything


def _measure_one(store: Store, agent: AgentRef, users: Counter[tuple[str, str]], note: str | None) -> AgentUsage:
    manifest = store.manifest(agent.domain, agent.manifest)
    files = files_of(store, agent.domain, agent.manifest)
    shared = sum(file.bytes for key, file in files.items() if users[key] > 1)
    domain = store.domain(agent.domain)
    return AgentUsage(
        name=agent.name,
        id=agent.id,
        domain=domain.name or domain.id,
        model=manifest.model.name,
        head=digest(agent.manifest),
        parent=digest(manifest.previous or manifest.resumes),
        note=note,
        tokens=manifest.tokens,
        blocks=total_blocks(files),
        bytes=total_bytes(files),
        own_bytes=total_bytes(files) - shared,
        shared_bytes=shared,
        snapshots=len(store.snapshots(agent.name)),
        complete=manifest.complete,
        created=agent.created,
        updated=agent.updated,
    )


@dataclass(frozen=True)
class GroupUsage:
    """The cached tokens of one layer group, in bytes as the codec keeps them and as float16 would."""

    id: str
    layers: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    tokens: int
    bytes: int
    fp16_bytes: int


def group_usage(manifest: Manifest, group: LayerGroup) -> GroupUsage:
    """What one layer group's cache takes; a window holds only the tokens that it still reaches."""
    tokens = manifest.cached - group.first_needed(manifest.cached)
    return GroupUsage(
        group.id,
        len(group.layers),
        group.kv_heads,
        group.key_dim,
        group.value_dim,
        group.window,
        tokens,
        round(bytes_per_token(group, manifest.codec) * tokens),
        fp16_bytes_per_token(group) * tokens,
    )
