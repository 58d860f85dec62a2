"""The disk usage of agents and states, and how much of it they share.

Values are named tuples: creating dataclasses would take 5% of the time of `amem inspect`.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from amem_cli.shell.output import digest
from kvstore.commit.journal import read_journal
from kvstore.errors import DamageError
from kvstore.format.kinds import BLOCK, MANIFEST
from kvstore.format.layers import LayerGroup, bytes_per_token, fp16_bytes_per_token, refined_parts
from kvstore.format.manifest import Manifest
from kvstore.format.records import AgentRef
from kvstore.graph.walk import StateFiles
from kvstore.store import Store


class FileUse(NamedTuple):
    """The size of a file that a state needs."""

    bytes: int
    is_block: bool


Files = dict[tuple[str, str], FileUse]  # by domain id and SHA-256


class AgentUsage(NamedTuple):
    """One agent in `inspect`. `bytes` counts every file that its head needs, not only blocks."""

    name: str
    id: str
    domain: str
    model: str
    head: str | None
    parent: str | None  # the state before the head; of a fork's first state, the state that it continues
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


def total_bytes(files: Files) -> int:
    return sum(file.bytes for file in files.values())


def total_blocks(files: Files) -> int:
    return sum(file.is_block for file in files.values())


class Usage:
    """The files of agents, reading each page once. For one agent pass all of its domain: files are shared within it."""

    def __init__(self, store: Store, agents: Sequence[AgentRef]) -> None:
        """Collect the files of the heads and snapshots of `agents`. Raises DamageError and IsolationError."""
        self._store = store
        self._files = {agent.domain: StateFiles(store, agent.domain) for agent in agents}
        self._snapshots = {agent.id: store.snapshots(agent.name) for agent in agents}
        self._needed = {agent.id: self._needed_by(agent) for agent in agents}
        self._users = Counter(key for files in self._needed.values() for key in files)
        self._notes = head_notes(store)

    @property
    def snapshots(self) -> int:
        return sum(map(len, self._snapshots.values()))

    @property
    def files(self) -> Files:
        """The files of all agents, each once."""
        everything: Files = {}
        for files in self._needed.values():
            everything |= files
        return everything

    def files_of(self, domain: str, digest: str) -> Files:
        """Every file that a state needs: its manifest, pages, blocks and tail."""
        manifest = self._store.manifest(domain, digest)
        size = self._store.layout.object(domain, MANIFEST, digest).stat().st_size
        files = {(domain, digest): FileUse(size, is_block=False)}
        for found, nbytes in self._files[domain].of(manifest):
            files[domain, found.sha256] = FileUse(nbytes, is_block=found.kind is BLOCK)
        return files

    def shared_bytes(self, files: Files, agent: AgentRef) -> int:
        """The bytes of those `files` that an agent other than `agent` needs as well."""
        own = self._needed[agent.id]
        return sum(file.bytes for key, file in files.items() if self._users[key] > (key in own))

    def agent(self, agent: AgentRef) -> AgentUsage:
        """The usage of one of the agents, at its head."""
        manifest = self._store.manifest(agent.domain, agent.manifest)
        files = self.files_of(agent.domain, agent.manifest)
        shared = self.shared_bytes(files, agent)
        domain = self._store.domain(agent.domain)
        return AgentUsage(
            name=agent.name,
            id=agent.id,
            domain=domain.name or domain.id,
            model=manifest.model.name,
            head=digest(agent.manifest),
            parent=digest(manifest.previous or manifest.resumes),
            note=self._notes.get(agent.manifest),
            tokens=manifest.tokens,
            blocks=total_blocks(files),
            bytes=total_bytes(files),
            own_bytes=total_bytes(files) - shared,
            shared_bytes=shared,
            snapshots=len(self._snapshots[agent.id]),
            complete=manifest.complete,
            created=agent.created,
            updated=agent.updated,
        )

    def _needed_by(self, agent: AgentRef) -> Files:
        files = self.files_of(agent.domain, agent.manifest)
        for snapshot in self._snapshots[agent.id]:
            files |= self.files_of(snapshot.domain, snapshot.manifest)
        return files


def head_notes(store: Store) -> dict[str, str]:
    """Notes given with `--note`, by the digest of the state. A damaged journal must not prevent listing agents."""
    notes: dict[str, str] = {}
    with suppress(DamageError):
        for entry in read_journal(store.layout.journal):
            if entry.change.after and entry.change.note:
                notes[entry.change.after] = entry.change.note
    return notes


class GroupUsage(NamedTuple):
    """The cached tokens of one layer group: bytes with the codec, and in float16."""

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
    """The usage of one layer group; a window counts only the tokens within it."""
    tokens = manifest.cached - group.first_needed(manifest.cached)
    refined = refined_parts(group, manifest.codec) if tokens >= manifest.codec.refined else []
    return GroupUsage(
        group.id,
        len(group.layers),
        group.kv_heads,
        group.key_dim,
        group.value_dim,
        group.window,
        tokens,
        round(bytes_per_token(group, manifest.codec) * tokens) + sum(part.nbytes for part in refined),
        fp16_bytes_per_token(group) * tokens,
    )
