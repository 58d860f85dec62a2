"""What the states of a store take on disk, and what they share with others.

Its values are named tuples: making dataclasses would be a twentieth of the time that `amem inspect` takes.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from amem_cli.shell.output import digest
from kvstore.commit.journal import read_journal
from kvstore.errors import DamageError
from kvstore.format.kinds import MANIFEST
from kvstore.format.layers import LayerGroup, bytes_per_token, fp16_bytes_per_token, refined_parts
from kvstore.format.manifest import FileRow, Manifest
from kvstore.format.records import AgentRef
from kvstore.store import Store


class FileUse(NamedTuple):
    """A file that a state needs."""

    bytes: int
    is_block: bool


Files = dict[tuple[str, str], FileUse]  # by domain id and SHA-256


class AgentUsage(NamedTuple):
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


def total_bytes(files: Files) -> int:
    return sum(file.bytes for file in files.values())


def total_blocks(files: Files) -> int:
    return sum(file.is_block for file in files.values())


class Usage:
    """What agents need, each page read once. For one agent the others of its domain will do: nobody else shares."""

    def __init__(self, store: Store, agents: Sequence[AgentRef]) -> None:
        """Read what the heads and snapshots of `agents` need. Raises DamageError and IsolationError."""
        self._store = store
        self._pages: dict[str, Files] = {}
        self._snapshots = {agent.id: store.snapshots(agent.name) for agent in agents}
        self._needed = {agent.id: self._needed_by(agent) for agent in agents}
        self._users = Counter(key for files in self._needed.values() for key in files)
        self._notes = head_notes(store)

    @property
    def snapshots(self) -> int:
        return sum(map(len, self._snapshots.values()))

    @property
    def files(self) -> Files:
        """The files that all of the agents need, each counted once."""
        everything: Files = {}
        for files in self._needed.values():
            everything |= files
        return everything

    def files_of(self, domain: str, digest: str) -> Files:
        """Every file that a state needs: its manifest, pages, blocks and tail."""
        manifest = self._store.manifest(domain, digest)
        size = self._store.layout.object(domain, MANIFEST, digest).stat().st_size
        files = {(domain, digest): FileUse(size, is_block=False)}
        for page in manifest.pages:
            files |= self._page(domain, page)
        files |= {(domain, row.sha256): FileUse(row.bytes, is_block=True) for row in manifest.window_blocks}
        if manifest.tail:
            files[domain, manifest.tail.sha256] = FileUse(manifest.tail.bytes, is_block=False)
        return files

    def shared_bytes(self, files: Files, agent: AgentRef) -> int:
        """What of `files` another agent than `agent` needs, too."""
        own = self._needed[agent.id]
        return sum(file.bytes for key, file in files.items() if self._users[key] > (key in own))

    def agent(self, agent: AgentRef) -> AgentUsage:
        """One of the agents, as its head is."""
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

    def _page(self, domain: str, row: FileRow) -> Files:
        """A page and the blocks that it lists."""
        if row.sha256 not in self._pages:
            blocks = self._store.page(domain, row).blocks
            self._pages[row.sha256] = {
                (domain, row.sha256): FileUse(row.bytes, is_block=False),
                **{(domain, block.sha256): FileUse(block.bytes, is_block=True) for block in blocks},
            }
        return self._pages[row.sha256]


def head_notes(store: Store) -> dict[str, str]:
    """What `--note` said of states, by their digest. A damaged journal keeps nobody from looking at agents."""
    notes: dict[str, str] = {}
    with suppress(DamageError):
        for entry in read_journal(store.layout.journal):
            if entry.change.after and entry.change.note:
                notes[entry.change.after] = entry.change.note
    return notes


class GroupUsage(NamedTuple):
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
