"""Reading a store: refs, manifests, pages and blocks. Nothing here writes, locks or needs the index."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.commit import refs
from kvstore.disk import files
from kvstore.errors import DamageError, IsolationError, NotFoundError
from kvstore.format.block import damaged, read_metadata, read_parts
from kvstore.format.kinds import BLOCK, MANIFEST, PAGE, TAIL, StoredObject, matches, name_at
from kvstore.format.layout import StoreLayout
from kvstore.format.manifest import BlockRow, FileRow, Manifest, Page, decode_manifest, decode_page
from kvstore.format.parts import Part
from kvstore.format.records import AgentRef, Domain, SnapshotRef

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Reader:
    """Everything that can be read from the store at `layout`."""

    def __init__(self, layout: StoreLayout) -> None:
        self.layout = layout

    def agents(self) -> list[AgentRef]:
        """All agents, by name. Raises DamageError."""
        return refs.read_agents(self.layout)

    def agent(self, name: str) -> AgentRef:
        """The agent of that name. Raises NotFoundError, whose hint gives similar names, and DamageError."""
        found = refs.read_agent(self.layout, name)
        if found is None or found.name != name:
            raise NotFoundError(f"no such agent: {name}", _close(name, [agent.name for agent in self.agents()]))
        return found

    def snapshots(self, agent_name: str) -> list[SnapshotRef]:
        """The snapshots of an agent, by name; never those of an earlier agent of that name. Raises NotFoundError."""
        agent = self.agent(agent_name)
        return [s for s in refs.read_snapshots(self.layout, agent_name) if s.agent_id == agent.id]

    def snapshot(self, agent_name: str, name: str) -> SnapshotRef:
        """One snapshot of an agent. Raises NotFoundError."""
        agent = self.agent(agent_name)
        found = refs.read_snapshot(self.layout, agent_name, name)
        if found is None or found.name != name or found.agent_id != agent.id:
            hint = _close(name, [snapshot.name for snapshot in self.snapshots(agent_name)])
            raise NotFoundError(f"agent {agent_name} has no snapshot {name}", hint)
        return found

    def domain(self, domain_id: str) -> Domain:
        """The domain of that id. Raises NotFoundError."""
        found = refs.read_domain(self.layout, domain_id)
        if found is None:
            raise NotFoundError(f"no such domain: {domain_id}", "`amem verify` lists the affected agents")
        return found

    def domains(self) -> list[Domain]:
        """All domains, by id."""
        return refs.read_domains(self.layout)

    def domain_named(self, name: str) -> Domain:
        """The domain of that name. Raises NotFoundError."""
        named = [domain for domain in self.domains() if domain.name is not None]
        for domain in named:
            if domain.name == name:
                return domain
        raise NotFoundError(f"no such domain: {name}", _close(name, [domain.name or "" for domain in named]))

    def has_manifest(self, domain_id: str, digest: str) -> bool:
        """Whether a state is still kept: gc deletes states from the history."""
        return self.layout.object(domain_id, MANIFEST, digest).is_file()

    def manifest(self, domain_id: str, digest: str) -> Manifest:
        """A manifest, checked by its SHA-256. Raises DamageError, IsolationError, NoStoreError (another version's)."""
        own = StoredObject(MANIFEST, digest)
        manifest = decode_manifest(self.read_object(domain_id, own), str(own))
        if manifest.domain != domain_id:
            raise _breach(str(own))
        return manifest

    def read_object(self, domain_id: str, found: StoredObject) -> bytes:
        """The bytes of an object, checked by its SHA-256. Raises DamageError."""
        path = self.layout.object(domain_id, *found)
        try:
            data = files.read(path)
        except FileNotFoundError as error:
            raise damaged(path, "is missing") from error
        if not matches(found, data):
            raise damaged(path, "is altered: its SHA-256 differs")
        return data

    def page(self, domain_id: str, row: FileRow) -> Page:
        """A page, checked by its SHA-256. Raises as `manifest` does."""
        own = StoredObject(PAGE, row.sha256)
        return decode_page(self.read_object(domain_id, own), str(own))

    def pages(self, manifest: Manifest) -> list[Page]:
        """All pages of a state, in order. Raises DamageError where they do not hold its tokens without a gap."""
        pages = []
        start = 0
        for row in manifest.pages:
            page = self.page(manifest.domain, row)
            path = self.layout.object(manifest.domain, PAGE, row.sha256)
            if page.salt != manifest.salt:
                raise _breach(name_at(path))
            if page.start != start:
                raise damaged(path, "does not follow the one before")
            start += len(page.tokens)
            pages.append(page)
        if start != manifest.tokens:
            raise DamageError(f"pages hold {start} tokens of {manifest.tokens}", "run `amem verify`")
        return pages

    def tokens(self, manifest: Manifest) -> "NDArray[np.int32]":
        """All token ids of a state, pending ones included: [tokens] int32."""
        import numpy as np  # only here, so that commands which read no tokens start fast

        return np.fromiter((token for page in self.pages(manifest) for token in page.tokens), np.int32, manifest.tokens)

    def blocks(self, manifest: Manifest) -> list[BlockRow]:
        """The rows of all blocks of a state: full-attention blocks from its pages, then window blocks."""
        return [row for page in self.pages(manifest) for row in page.blocks] + list(manifest.window_blocks)

    def read_block(self, domain_id: str, row: BlockRow, parts: Sequence[Part], buffers: Sequence[memoryview]) -> None:
        """Read a block into `buffers`, one writable C-contiguous buffer for each part, checksum and origin checked.

        Raises DamageError, and IsolationError for a block of another domain; the content of `buffers` is then
        undefined. May be called from several threads.
        """
        path = self.layout.object(domain_id, BLOCK, row.sha256)
        metadata = self._read(path, domain_id, row, parts, buffers)
        expected = {"group": row.group, "position": str(row.position), "prefix_key": row.prefix_key}
        _check_metadata(path, metadata, expected)

    def read_tail(self, manifest: Manifest, parts: Sequence[Part], buffers: Sequence[memoryview]) -> None:
        """Read a state's tail, which it must have. As `read_block`."""
        assert manifest.tail is not None
        path = self.layout.object(manifest.domain, TAIL, manifest.tail.sha256)
        metadata = self._read(path, manifest.domain, manifest.tail, parts, buffers)
        if metadata.get("salt") != manifest.salt:
            raise _breach(name_at(path))
        _check_metadata(path, metadata, {"tokens": str(manifest.tail.tokens)})

    def _read(
        self,
        path: Path,
        domain_id: str,
        row: BlockRow | FileRow,
        parts: Sequence[Part],
        buffers: Sequence[memoryview],
    ) -> dict[str, str]:
        try:
            metadata = read_parts(path, row.bytes, row.xxh3, parts, buffers)
        except DamageError as damage:
            if self._is_foreign(path, domain_id):
                raise _breach(name_at(path)) from damage
            raise
        if metadata.get("domain") != domain_id:
            raise _breach(name_at(path))
        return metadata

    def _is_foreign(self, path: Path, domain_id: str) -> bool:
        """Whether a damaged file is whole enough to say that it belongs to another domain of this store.

        A domain that does not exist is a flipped bit rather than a breach.
        """
        try:
            owner = read_metadata(path).get("domain", domain_id)
        except DamageError:
            return False
        return owner != domain_id and owner in {domain.id for domain in self.domains()}


def _check_metadata(path: Path, metadata: dict[str, str], expected: dict[str, str]) -> None:
    if any(metadata.get(name) != value for name, value in expected.items()):
        raise damaged(path, "does not match its row")


def _breach(found: str) -> IsolationError:
    return IsolationError(
        f"{found} belongs to another domain", "stop using this store and run `amem verify --isolation`"
    )


def _close(name: str, names: list[str]) -> str:
    from difflib import get_close_matches  # only here: commands that find what they look for start faster

    close = get_close_matches(name, names, n=3) or [other for other in names if other.lower() == name.lower()]
    return f"did you mean {' or '.join(close)}?" if close else "`amem inspect` lists the agents"
