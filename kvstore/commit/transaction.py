"""How an agent's state gets to disk.

A transaction writes new files into its staging folder, and a commit moves them into place, flushes their folders,
and moves the agent's ref: that rename is the only commit point. A crash at any instant leaves the old state or the
new one, and at most unreachable files.

gc may run beside it. A commit holds the shared store lock from its first rename to its last, and what it uses again
it has pinned before. gc must unlink a manifest before what the manifest names.
"""

from collections.abc import Iterable, Sequence
from types import TracebackType

from kvstore.commit import refs
from kvstore.commit.journal import Actor, Change, JournalWriter
from kvstore.commit.staging import Staging, shared_store_lock
from kvstore.disk.files import Buffer
from kvstore.disk.locks import Lock
from kvstore.errors import ConflictError, IsolationError, NotFoundError
from kvstore.format.block import BlockHeader, FileDigest, TailHeader, check_buffers, damaged, digest, encode_header
from kvstore.format.kinds import BLOCK, MANIFEST, PAGE, TAIL, ObjectKind, StoredObject
from kvstore.format.layout import StoreLayout
from kvstore.format.manifest import BlockRow, FileRow, Manifest, Page, encode
from kvstore.format.parts import Part
from kvstore.format.records import AgentRef, Domain, SnapshotRef
from kvstore.format.references import named_by


class AgentHold:
    """The exclusive right to change one agent. `agent` is None as long as no agent has that name."""

    def __init__(self, name: str, agent: AgentRef | None, lock: Lock) -> None:
        self.name = name
        self.agent = agent
        self._lock = lock

    @property
    def active(self) -> bool:
        return self._lock.held


class Transaction:
    """New files of one domain, and the commits that make them part of agents. A context manager.

    Leaving it deletes what is not committed. `put_block` may be called from several threads.
    """

    def __init__(self, layout: StoreLayout, actor: Actor, domain: Domain) -> None:
        self.domain = domain
        self.new_blocks = 0
        self.block_bytes = 0
        self._layout = layout
        self._actor = actor
        from kvstore.commit.index import Index  # only writers need SQLite: commands that read start faster without it

        self._index = Index(layout)
        self._new_rows: list[BlockRow] = []
        self._page_rows: list[BlockRow] = []  # the blocks that the pages put here list

    @property
    def bytes_written(self) -> int:
        """Bytes of the blocks, tails, pages and manifests written so far."""
        return self._staging.bytes_written

    def __enter__(self) -> "Transaction":
        self._staging = Staging(self._layout, self._actor)
        try:
            self._staging.pin([self.domain.id])
        except BaseException:
            self._staging.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._staging.close()

    def find(self, prefix_keys: Sequence[str]) -> list[BlockRow | None]:
        """For each key the first committed block that still exists, pinned; None without one."""
        with shared_store_lock(self._layout, self._actor):
            found = self._index.find(self.domain.id, prefix_keys)
            self._staging.pin_under_lock(row.sha256 for rows in found for row in rows)
            return [next(filter(self._is_there, rows), None) for rows in found]

    def pin(self, rows: Iterable[BlockRow | FileRow]) -> None:
        """Keep blocks, tails or pages of an earlier state from gc. The commit checks that they exist."""
        self._staging.pin(row.sha256 for row in rows)

    def put_block(self, header: BlockHeader, buffers: Sequence[Buffer], parts: Sequence[Part]) -> BlockRow:
        """Store one block: a C-contiguous buffer for each of `parts`, token ids first.

        An existing one stays, or is replaced where it is damaged. Raises IsolationError for a header of
        another domain, NoSpaceError.
        """
        whole = self._whole(header, buffers, parts)
        found = digest(whole)
        row = BlockRow(header.group, header.position, header.prefix_key, found.sha256, found.xxh3, found.bytes)
        if self._put(BLOCK, found, whole):
            self.new_blocks += 1
            self.block_bytes += found.bytes
            self._new_rows.append(row)
        return row

    def put_tail(self, header: TailHeader, buffers: Sequence[Buffer], parts: Sequence[Part]) -> FileRow:
        """Store a tail: a C-contiguous buffer for each of `parts`. Raises as `put_block`."""
        whole = self._whole(header, buffers, parts)
        found = digest(whole)
        self._put(TAIL, found, whole)
        return FileRow(found.sha256, found.xxh3, found.bytes, header.tokens)

    def put_page(self, page: Page) -> FileRow:
        """Store a page. Raises as `put_block`."""
        if page.salt != self.domain.salt:
            raise IsolationError("a page of another domain cannot be stored in this one", "run `amem verify`")
        data = encode(page)
        found = digest([data])
        self._put(PAGE, found, [data])
        self._page_rows += page.blocks
        return FileRow(found.sha256, found.xxh3, found.bytes, len(page.tokens))

    def put_manifest(self, manifest: Manifest) -> str:
        """Store an earlier state, which the one to be committed names. Returns its digest. Raises as `put_block`."""
        self._check_domain(manifest)
        data = encode(manifest)
        found = digest([data])
        self._put(MANIFEST, found, [data])
        return found.sha256

    def commit(
        self,
        hold: AgentHold,
        manifest: Manifest,
        before: str | None,
        note: str | None = None,
        snapshots: Sequence[SnapshotRef] = (),
    ) -> str:
        """Make `manifest` the head of the held agent, in the place of the state `before` (None: of a new agent).

        `snapshots` are those that a new agent brings with it. Returns the head's digest. Raises ConflictError where the
        head is another one, DamageError where a reused file was deleted, NoSpaceError. Whatever it raises, the
        head is the old state or the new one.
        """
        self._check(hold, manifest)
        data = encode(manifest)
        found = digest([data])
        with shared_store_lock(self._layout, self._actor):
            refs.put_domain(self._layout, self.domain, self._staging.folder / "domain")
            self._check_named(manifest)
            self._put(MANIFEST, found, [data])
            self._staging.place()
            with refs.moving(self._layout, self._actor) as journal:
                hold.agent = self._move(journal, hold.name, manifest, before, found.sha256, note, snapshots)
        self._index.add(self.domain.id, self._new_rows)
        self._new_rows = []
        return found.sha256

    def heal(self) -> None:
        """Put staged files into place and move no ref: damaged files of committed states become whole."""
        with shared_store_lock(self._layout, self._actor):
            self._staging.place()

    def _put(self, kind: ObjectKind, found: FileDigest, buffers: Sequence[Buffer]) -> bool:
        """Stage an object, unless exactly that one exists."""
        return self._staging.put(self._layout.object(self.domain.id, kind, found.sha256), found, buffers, kind.mode)

    def _whole(
        self, header: BlockHeader | TailHeader, buffers: Sequence[Buffer], parts: Sequence[Part]
    ) -> list[Buffer]:
        """All bytes of a block or a tail file."""
        if header.domain != self.domain.id:
            raise IsolationError(f"a block of domain {header.domain} cannot be stored in domain {self.domain.id}")
        check_buffers(parts, buffers)
        return [encode_header(header.metadata(), parts), *buffers]

    def _is_there(self, row: BlockRow) -> bool:
        try:
            return self._layout.object(self.domain.id, BLOCK, row.sha256).lstat().st_size == row.bytes
        except FileNotFoundError:
            return False

    def _check(self, hold: AgentHold, manifest: Manifest) -> None:
        if not hold.active:
            raise ValueError("the agent's lock was given back before the commit")
        self._check_domain(manifest)
        if hold.agent and (hold.agent.id, hold.agent.domain) != (manifest.agent, manifest.domain):
            raise ConflictError(f"agent {hold.name} cannot change its id or its domain", "take another name")

    def _check_domain(self, manifest: Manifest) -> None:
        if (manifest.domain, manifest.salt) != (self.domain.id, self.domain.salt):
            raise IsolationError(f"a manifest of domain {manifest.domain} cannot be stored in domain {self.domain.id}")

    def _check_named(self, manifest: Manifest) -> None:
        """Check that every file of a manifest is in place or staged. Pages of an earlier state cover their blocks."""
        layout, domain_id = self._layout, self.domain.id
        named = [named.object for named in named_by(manifest)]
        named += [StoredObject(BLOCK, row.sha256) for row in self._page_rows]
        for path in (layout.object(domain_id, *found) for found in named):
            if not self._staging.has(path):
                raise damaged(path, "was deleted while it was in use")
        if manifest.resumes and not self._staging.has(layout.object(domain_id, MANIFEST, manifest.resumes)):
            raise NotFoundError(f"the state sha256:{manifest.resumes} has just been removed", "choose another one")

    def _move(
        self,
        journal: JournalWriter,
        name: str,
        manifest: Manifest,
        before: str | None,
        after: str,
        note: str | None,
        snapshots: Sequence[SnapshotRef],
    ) -> AgentRef:
        """Compare and swap the ref, the intent first; snapshots before it, invisible without the agent."""
        current = refs.read_agent(self._layout, name)
        if (current.manifest if current else None) != before:
            raise ConflictError(f"the head of agent {name} has moved", "look at it with `amem inspect`, and try again")
        entry = journal.append(Change(manifest.op, manifest.agent, manifest.domain, before, after, note))
        for snapshot in snapshots:
            refs.put(self._layout, snapshot)
        created = current.created if current else entry.time
        ref = AgentRef(name, manifest.agent, manifest.domain, after, created, entry.time)
        refs.put(self._layout, ref)
        return ref
