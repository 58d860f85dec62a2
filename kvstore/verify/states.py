"""Check the states of one domain: everything that a ref reaches, each file once however many states share it."""

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvstore.disk.hashing import sha256_of
from kvstore.errors import AmemError
from kvstore.format.block import read_metadata
from kvstore.format.kinds import BLOCK, MANIFEST, PAGE, TAIL, StoredObject
from kvstore.format.layers import block_parts, tail_parts
from kvstore.format.manifest import BlockRow, FileRow, Manifest, Page
from kvstore.format.parts import BLOCK_TOKENS, Part
from kvstore.format.prefix_keys import prefix_key
from kvstore.format.records import Domain
from kvstore.format.references import named_by
from kvstore.graph.roots import Root
from kvstore.graph.walk import StateWalk, own_history
from kvstore.store import Store
from kvstore.verify.checks import Depth
from kvstore.verify.findings import Findings


@dataclass(frozen=True)
class _PageFacts:
    """What later states need of a page that was checked."""

    start: int
    tokens: int
    positions: dict[str, frozenset[int]]  # of its blocks, by layer group


@dataclass
class StateCheck:
    """The states of one domain. `present` holds the files that were listed, and their bytes."""

    store: Store
    domain: Domain
    present: dict[StoredObject, int]
    depth: Depth
    findings: Findings
    seen: dict[StoredObject, int] = field(default_factory=dict)  # what was checked → its bytes
    _states: dict[str, Manifest | None] = field(default_factory=dict)  # that were checked; None: cannot be read
    _pages: dict[str, _PageFacts | None] = field(default_factory=dict)
    _buffers: dict[tuple[Part, ...], list[memoryview]] = field(default_factory=dict)

    def check(self, root: Root) -> None:
        """Check the state that a ref names, and every kept state that it came from."""
        walk = StateWalk(self.store, self.domain.id, own_history(root.agent_id), self._state)
        for digest, manifest in walk.visit([root.manifest]):
            is_head = digest == root.manifest and not root.snapshot
            if manifest and is_head and manifest.agent != root.agent_id:
                self.findings.add("damage", "ref", str(root), f"{root} names a state of another agent", [root.agent])

    def _state(self, digest: str) -> Manifest | None:
        """Read a state and check its files, unless that is done. None where it cannot be read."""
        if digest not in self._states:
            self._states[digest] = self._check_state(StoredObject(MANIFEST, digest))
        return self._states[digest]

    def _check_state(self, own: StoredObject) -> Manifest | None:
        self.seen[own] = self._size(own) or 0
        try:
            manifest = self.store.manifest(self.domain.id, own.sha256)
        except AmemError as error:
            self.findings.add_error(self.store.layout, self.domain.id, own, error)
            return None
        self._check_manifest(own, manifest)
        for named in named_by(manifest):  # what has no check of its own
            if named.object not in self.seen and self._is_present(*named) and self.depth != "quick":
                self._check_sha256(named.object)
        return manifest

    def check_rest(self) -> None:
        """Check unreachable files: a later commit may find them and use them again."""
        for found, size in self.present.items():
            if found not in self.seen:
                self.seen[found] = size
                if self.depth != "quick":
                    self._check_sha256(found)

    def _check_manifest(self, own: StoredObject, manifest: Manifest) -> None:
        if manifest.salt != self.domain.salt:
            self._breach(own, "has another domain's salt")
        start = 0
        listed: dict[str, set[int]] = defaultdict(set)
        for row in manifest.pages:
            facts = self._page(row, manifest)
            if facts is None:
                return
            if facts.start != start or facts.tokens != row.tokens:
                self._damage(StoredObject(PAGE, row.sha256), "does not follow the page before it")
            start += facts.tokens
            for group_id, positions in facts.positions.items():
                listed[group_id] |= positions
        if start != manifest.tokens:
            self._damage(own, f"has pages of {start} tokens, and says {manifest.tokens}")
        for block in manifest.window_blocks:
            listed[block.group].add(block.position)
            self._block(block, manifest, None)
        self._check_complete(own, manifest, listed)
        self._tail(own, manifest)

    def _check_complete(self, own: StoredObject, manifest: Manifest, listed: dict[str, set[int]]) -> None:
        """Every block that a resume needs has a row."""
        for group in manifest.groups:
            needed = {number * BLOCK_TOKENS for number in group.needed_blocks(manifest.cached)}
            if not needed <= listed[group.id]:
                self._damage(own, f"lists fewer blocks of {group.id} than its {manifest.cached} tokens need")

    def _page(self, row: FileRow, manifest: Manifest) -> _PageFacts | None:
        """Check a page and its blocks, unless that is done. None where it cannot be read."""
        if row.sha256 in self._pages:
            return self._pages[row.sha256]
        own = StoredObject(PAGE, row.sha256)
        self.seen[own] = self._size(own) or 0
        self._pages[row.sha256] = None
        try:
            page = self.store.page(self.domain.id, row)
        except AmemError as error:
            self.findings.add_error(self.store.layout, self.domain.id, own, error)
            return None
        if page.salt != self.domain.salt:
            self._breach(own, "has another domain's salt")
        positions: dict[str, set[int]] = defaultdict(set)
        for block in page.blocks:
            positions[block.group].add(block.position)
            self._block(block, manifest, page)
        frozen = {group_id: frozenset(found) for group_id, found in positions.items()}
        self._pages[row.sha256] = facts = _PageFacts(page.start, len(page.tokens), frozen)
        return facts

    def _block(self, row: BlockRow, manifest: Manifest, page: Page | None) -> None:
        own = StoredObject(BLOCK, row.sha256)
        if own in self.seen or not self._is_present(own, row.bytes) or self.depth == "quick":
            return
        group = next((group for group in manifest.groups if group.id == row.group), None)
        if group is None:
            self._damage(own, "is of a layer group that its state does not have")
            return
        parts = block_parts(group, manifest.codec, row.position)
        if not self._fits(own, parts, row.bytes):
            return
        buffers = self._buffers_for(parts)
        try:
            self.store.read_block(self.domain.id, row, parts, buffers)
            metadata = read_metadata(self.store.layout.object(self.domain.id, *own))
        except AmemError as error:
            self.findings.add_error(self.store.layout, self.domain.id, own, error)
            return
        ids = np.frombuffer(buffers[0], "<i4")
        if page and not np.array_equal(ids, page.tokens[row.position - page.start :][:BLOCK_TOKENS]):
            self._damage(own, "holds other tokens than its page")
        model, codec, parent = manifest.model.fingerprint, manifest.codec.name, metadata.get("parent_key", "")
        key = prefix_key(self.domain.salt, model, codec, row.group, parent, ids)
        if (key, model, codec) != (row.prefix_key, metadata.get("model"), metadata.get("codec")):
            self._damage(own, "has a prefix key that is not that of its domain, model, codec and tokens")
        if self.depth == "deep":
            self._check_sha256(own)

    def _tail(self, own: StoredObject, manifest: Manifest) -> None:
        row = manifest.tail
        if row is None:
            return
        if row.tokens != manifest.cached % BLOCK_TOKENS:
            self._damage(own, f"has a tail of {row.tokens} tokens, and {manifest.cached} cached ones")
            return
        tail = StoredObject(TAIL, row.sha256)
        if tail in self.seen or not self._is_present(tail, row.bytes) or self.depth == "quick":
            return
        parts = tail_parts(manifest.groups, manifest.codec, manifest.cached)
        if not self._fits(tail, parts, row.bytes):
            return
        try:
            self.store.read_tail(manifest, parts, self._buffers_for(parts))
        except AmemError as error:
            self.findings.add_error(self.store.layout, self.domain.id, tail, error)
            return
        if self.depth == "deep":
            self._check_sha256(tail)

    def _fits(self, found: StoredObject, parts: Sequence[Part], nbytes: int) -> bool:
        """Whether the parts fit into a file of `nbytes`: sizes in a damaged manifest must not claim memory."""
        fits = sum(part.nbytes for part in parts) <= nbytes
        if not fits:
            self._damage(found, "is smaller than the parts that its state describes")
        return fits

    def _is_present(self, found: StoredObject, expected: int) -> bool:
        """Whether a file exists and has its size. Notes that it was looked at."""
        size = self._size(found)
        self.seen[found] = size or 0
        if size is None:
            is_other = os.path.lexists(self.store.layout.object(self.domain.id, *found))
            text = f"{found} is not a regular file" if is_other else f"{found} is missing"
            self.findings.add_object(self.domain.id, found, "damage", "altered" if is_other else "missing", text)
        elif size != expected:
            self._damage(found, f"has {size} bytes instead of {expected}")
        return size == expected

    def _size(self, found: StoredObject) -> int | None:
        """Bytes of a regular file; one that came after the listing is looked for again."""
        if found in self.present:
            return self.present[found]
        path = self.store.layout.object(self.domain.id, *found)
        return path.lstat().st_size if path.is_file() and not path.is_symlink() else None

    def _check_sha256(self, found: StoredObject) -> None:
        """Hold a file against its name."""
        try:
            actual = sha256_of(self.store.layout.object(self.domain.id, *found))
        except FileNotFoundError:  # gc has taken it
            return
        except AmemError as error:
            self.findings.add_error(self.store.layout, self.domain.id, found, error)
            return
        if actual != found.sha256:
            self._damage(found, "is altered: its SHA-256 differs")

    def _buffers_for(self, parts: Sequence[Part]) -> list[memoryview]:
        key = tuple(parts)
        if key not in self._buffers:
            self._buffers[key] = [memoryview(bytearray(part.nbytes)) for part in parts]
        return self._buffers[key]

    def _damage(self, found: StoredObject, how: str) -> None:
        self.findings.add_object(self.domain.id, found, "damage", "altered", f"{found} {how}")

    def _breach(self, found: StoredObject, how: str) -> None:
        self.findings.add_object(self.domain.id, found, "breach", "boundary", f"{found} {how}")
