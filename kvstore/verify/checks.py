"""What a verification checks, and what it reports."""

from dataclasses import dataclass
from typing import Literal

from kvstore.verify.findings import Finding

Depth = Literal["quick", "checksums", "deep"]


@dataclass(frozen=True)
class Checks:
    """What to check. `agents`: only what these need; `depth` None: no states."""

    depth: Depth | None = "checksums"
    isolation: bool = True
    journal: bool = True
    journal_head: str | None = None  # the beginning of the digest, in hex, of a line that must be in the journal
    agents: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """What a verification found. `objects_digest`: SHA-256 over the sorted lines `DOMAIN/KIND/SHA256` of `checked`."""

    findings: tuple[Finding, ...]
    checked: int  # blocks, tails, pages and manifests
    bytes: int
    proven: tuple[str, ...]
    not_proven: tuple[str, ...]
    store_id: str
    started: str
    finished: str
    objects_digest: str
    journal_lines: int
    journal_head: str | None

    @property
    def breached(self) -> bool:
        return any(finding.severity == "breach" for finding in self.findings)
