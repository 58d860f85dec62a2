"""Isolation: nothing of one domain stands where another would read it, and nobody else can read the store."""

import os
import stat
from collections.abc import Container, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from kvstore.commit.index import Index
from kvstore.disk import files
from kvstore.disk.canonical_json import load
from kvstore.errors import AmemError
from kvstore.format.block import read_metadata
from kvstore.format.layout import StoreLayout
from kvstore.format.records import Domain
from kvstore.graph.objects import StoredObject
from kvstore.verify.findings import Findings
from kvstore.verify.hashing import sha256_of


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
    """Every file of a domain says itself that it belongs there. `others`: ids and salts of all domains.

    One that says something else, and is neither intact nor another domain's, is damage, which is told elsewhere.
    """
    for found in objects:
        path = found.path(layout, domain.id)
        with suppress(AmemError, FileNotFoundError):
            strange = _says(path, found.kind) - {domain.id, domain.salt}
            if strange and (any(value in others for value in strange) or sha256_of(path) == found.sha256):
                text = f"{found} stands in domain {domain.id}, and belongs to another"
                findings.add_object(domain.id, found, "breach", "boundary", text)


def _says(path: Path, kind: str) -> set[str]:
    """What a file says of its domain: the id, the salt, or both."""
    values = read_metadata(path) if kind in ("blocks", "tails") else load(files.read(path)) or {}
    return {str(values[name]) for name in ("domain", "salt") if name in values}


class Once:
    """No digest stands under two domains: equal content has another salt, hence another digest."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._home: dict[StoredObject, str] = {}

    def check(self, domain_id: str, objects: Iterable[StoredObject]) -> None:
        for found in objects:
            home = self._home.setdefault(found, domain_id)
            if home != domain_id:
                text = f"{found} stands in domain {domain_id} and in domain {home}"
                self._findings.add_object(domain_id, found, "breach", "boundary", text)

    def home(self, sha256: str) -> str | None:
        """The domain that a block stands in."""
        return self._home.get(StoredObject("blocks", sha256))


def check_index(layout: StoreLayout, domain_ids: Iterable[str], once: Once, findings: Findings) -> bool:
    """No row of the index leads to another domain's block; rows of blocks that are gone lead nowhere.

    Returns whether the index could be read.
    """
    for domain_id in domain_ids:
        listed = Index(layout).listed(domain_id)
        if listed is None:
            return False
        for sha256 in listed:
            home = once.home(sha256)
            if home not in (None, domain_id) and not layout.block(domain_id, sha256).exists():
                text = f"a row of domain {domain_id} leads to block sha256:{sha256} of domain {home}"
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
            findings.add("breach", "link", what, f"{what} has a second hard link: somebody may hold or change it")
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
    is_block = path.suffix == ".safetensors" and path.parent.parent.name == "blocks"
    return (0o400,) if is_block else (0o600,)


def _walk(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Everything below a folder; follows no link, and passes over what goes meanwhile."""
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            yield Path(entry.path), status
            if stat.S_ISDIR(status.st_mode):
                yield from _walk(Path(entry.path))
