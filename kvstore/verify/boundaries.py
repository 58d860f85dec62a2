"""Isolation: nothing of one domain is where another would read it, and no other user can read the store."""

import os
import stat
from collections.abc import Container, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from kvstore.commit.index import Index
from kvstore.disk import files
from kvstore.disk.canonical_json import load
from kvstore.disk.hashing import sha256_of
from kvstore.errors import AmemError
from kvstore.format.block import read_metadata
from kvstore.format.kinds import BLOCK, ObjectKind, StoredObject, kind_in
from kvstore.format.layout import StoreLayout
from kvstore.format.records import Domain
from kvstore.verify.findings import Findings


def check_salts(domains: Iterable[Domain], findings: Findings) -> None:
    """No two domains have one salt."""
    known: dict[str, Domain] = {}
    for domain in domains:
        other = known.setdefault(domain.salt, domain)
        if other is not domain:
            findings.add("breach", "boundary", domain.id, f"domains {other.id} and {domain.id} have the same salt")


def check_origin(
    layout: StoreLayout, domain: Domain, others: Container[str], objects: Iterable[StoredObject], findings: Findings
) -> None:
    """Every file of a domain names its domain. `others`: ids and salts of all domains.

    A file that names another one, and is neither intact nor another domain's, is damage, which the states' check
    reports.
    """
    for found in objects:
        path = layout.object(domain.id, *found)
        with suppress(AmemError, FileNotFoundError):
            strange = _owners(path, found.kind) - {domain.id, domain.salt}
            if strange and (any(value in others for value in strange) or sha256_of(path) == found.sha256):
                text = f"{found} is in domain {domain.id} and belongs to another"
                findings.add_object(domain.id, found, "breach", "boundary", text)


def _owners(path: Path, kind: ObjectKind) -> set[str]:
    """The domain's id, its salt, or both, as the file itself has them."""
    values = (load(files.read(path)) or {}) if kind.is_document else read_metadata(path)
    return {str(values[name]) for name in ("domain", "salt") if name in values}


class Once:
    """No digest occurs in two domains: equal content has another salt, hence another digest."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._home: dict[StoredObject, str] = {}

    def check(self, domain_id: str, objects: Iterable[StoredObject]) -> None:
        for found in objects:
            home = self._home.setdefault(found, domain_id)
            if home != domain_id:
                text = f"{found} is in domain {domain_id} and in domain {home}"
                self._findings.add_object(domain_id, found, "breach", "boundary", text)

    def home(self, sha256: str) -> str | None:
        """The domain that a block is in."""
        return self._home.get(StoredObject(BLOCK, sha256))


def check_index(layout: StoreLayout, domain_ids: Iterable[str], once: Once, findings: Findings) -> bool:
    """No row of the index names another domain's block; rows of deleted blocks are harmless.

    Returns whether the index could be read.
    """
    for domain_id in domain_ids:
        listed = Index(layout).listed(domain_id)
        if listed is None:
            return False
        for sha256 in listed:
            home = once.home(sha256)
            if home not in (None, domain_id) and not layout.object(domain_id, BLOCK, sha256).exists():
                text = f"a row of domain {domain_id} names block sha256:{sha256} of domain {home}"
                findings.add("breach", "index", f"sha256:{sha256}", text)
    return True


def check_staging(layout: StoreLayout, domain_ids: frozenset[str], findings: Findings) -> None:
    """What a transaction has staged is of the domain that it has pinned."""
    for folder in (path for path in layout.staging.iterdir() if path.is_dir()):
        with suppress(AmemError, FileNotFoundError, NotADirectoryError):
            pinned = domain_ids & set(files.read(folder / "pins").decode().split())
            for path in folder.iterdir():
                if path.name in ("pins", "domain"):
                    continue
                with suppress(AmemError, FileNotFoundError):  # half written, or placed meanwhile
                    owner = read_metadata(path).get("domain")
                    if owner in domain_ids and owner not in pinned:
                        text = f"{path.name} is staged for another domain than {owner}"
                        findings.add("breach", "boundary", f"staging/{folder.name}/{path.name}", text)


def check_access(layout: StoreLayout, findings: Findings) -> None:
    """Folders are 0700, files 0600 and blocks 0400; no file has a second name; all belong to the store's owner."""
    owner = layout.root.stat().st_uid
    for path, status in _walk(layout.root):
        what = str(path.relative_to(layout.root))
        mode = stat.S_IMODE(status.st_mode)
        wanted = _modes(layout, path, status)
        if wanted and mode not in wanted:
            text = f"{what} has mode {mode:04o} instead of {wanted[0]:04o}"
            findings.add("breach" if mode & 0o077 else "damage", "mode", what, text)
        if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
            findings.add(
                "breach", "link", what, f"{what} has a second hard link, through which it can be read or changed"
            )
        if status.st_uid != owner:
            findings.add("breach", "owner", what, f"{what} belongs to user {status.st_uid}, the store to user {owner}")


def _modes(layout: StoreLayout, path: Path, status: os.stat_result) -> tuple[int, ...]:
    """The modes that are right, the usual one first; none are for what is neither a folder nor a file."""
    if stat.S_ISDIR(status.st_mode):
        return (0o700,)
    if not stat.S_ISREG(status.st_mode):
        return ()
    if path.is_relative_to(layout.staging):
        return (0o600, 0o400)
    kind = kind_in(path.parent.parent.name)
    is_object = kind is not None and kind.digest_of(path.name) is not None
    return (kind.mode if kind and is_object else 0o600,)


def _walk(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Everything below a folder. Follows no link, and skips what is deleted meanwhile."""
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            yield Path(entry.path), status
            if stat.S_ISDIR(status.st_mode):
                yield from _walk(Path(entry.path))
