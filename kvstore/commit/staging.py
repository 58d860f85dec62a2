"""A writer's own folder: the files that it will put into place, and the list of what gc must leave alone meanwhile.

A writer first writes what it is going to use into its `pins` (ids and digests, one a line) under the shared store
lock, and then checks that it exists; gc reads the pins under the exclusive lock. The folder itself is locked as long
as its writer lives; the next writer removes those of dead ones.
"""

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from kvstore.commit.journal import Actor
from kvstore.disk import files
from kvstore.disk.files import Buffer
from kvstore.disk.locks import INTERNAL_WAIT, Lock, lock_folder
from kvstore.errors import AmemError
from kvstore.format.block import FileDigest, is_intact
from kvstore.format.layout import StoreLayout
from kvstore.naming import new_id

RUNNING = "a running command"
"""Who holds what a transaction has pinned, as reports name it."""


def shared_store_lock(layout: StoreLayout, actor: Actor) -> Lock:
    """Keep gc from unlinking anything until this is released."""
    return Lock(layout.lock("store"), "the store", actor.via).acquire(shared=True, wait=INTERNAL_WAIT)


def exclusive_store_lock(layout: StoreLayout, actor: Actor) -> Lock:
    """No process commits, looks for blocks to reuse, or deletes until this is released."""
    return Lock(layout.lock("store"), "the store", actor.via).acquire(shared=False, wait=INTERNAL_WAIT)


class Staging:
    """A new staging folder, locked. `close` drops what was not placed."""

    def __init__(self, layout: StoreLayout, actor: Actor) -> None:
        self.bytes_written = 0
        self._layout = layout
        self._actor = actor
        self._staged: dict[Path, Path] = {}  # final path → staged path
        sweep(layout)
        self.folder, self._descriptor = _new_folder(layout)

    def close(self) -> None:
        with suppress(AmemError):  # what cannot be removed now, the next writer's sweep removes
            files.remove_folder(self.folder)
        os.close(self._descriptor)

    def pin(self, ids: Iterable[str]) -> None:
        """Keep blocks, tails, pages, manifests (by digest) or a domain (by id) from gc."""
        with shared_store_lock(self._layout, self._actor):
            self.pin_under_lock(ids)

    def pin_under_lock(self, ids: Iterable[str]) -> None:
        """`pin`, for a caller that holds the shared store lock and looks whether they are there before it ends."""
        if lines := "".join(f"{pinned}\n" for pinned in ids):
            files.append(self.folder / "pins", lines.encode(), flush=False)

    def put(self, target: Path, found: FileDigest, buffers: Sequence[Buffer], mode: int = 0o600) -> bool:
        """Stage a file for `target`; False where exactly that file is in place or staged already.

        A damaged one is replaced when this is placed.
        """
        if target in self._staged:
            return False
        with shared_store_lock(self._layout, self._actor):
            self.pin_under_lock([found.sha256])
            if is_intact(target, found):
                return False
        source = self.folder / found.sha256
        files.write_new(source, buffers, mode)
        self._staged[target] = source
        self.bytes_written += found.bytes
        return True

    def has(self, target: Path) -> bool:
        """Whether a file is staged, or in place."""
        return target in self._staged or target.is_file()

    def place(self) -> None:
        """Move everything into place, and flush each folder and its parent once."""
        for target, source in self._staged.items():
            files.make_dir(target.parent)
            files.replace(source, target)
        for folder in sorted({folder for target in self._staged for folder in (target.parent, target.parent.parent)}):
            files.sync_dir(folder)
        self._staged = {}


def _new_folder(layout: StoreLayout) -> tuple[Path, int]:
    """A new staging folder and the descriptor that locks it."""
    while True:
        folder = layout.transaction(new_id())
        files.make_dir(folder)
        descriptor = lock_folder(folder)
        if descriptor is not None:  # else another writer's sweep was faster, and removes it
            return folder, descriptor


def sweep(layout: StoreLayout) -> None:
    """Remove the staging folders of dead writers: their locks are free."""
    for folder in layout.staging.iterdir():
        descriptor = lock_folder(folder)
        if descriptor is not None:
            try:
                files.remove_folder(folder)
            finally:
                os.close(descriptor)


def live_pins(layout: StoreLayout) -> set[str]:
    """What transactions under way hold, as digests and domain ids. Stable under the exclusive store lock."""
    pins: set[str] = set()
    for folder in layout.staging.iterdir():
        descriptor = lock_folder(folder)
        if descriptor is not None:  # its writer is dead
            os.close(descriptor)
            continue
        try:
            pins.update(files.read(folder / "pins").decode().split())
        except FileNotFoundError:
            continue
    return pins
