"""The history of agents, of a domain and of a store, from manifests and the journal. Nothing here writes.

A commit is one state of an agent's history, newest first, as far as gc has kept it. The turns of a commit are those
that the state it continues does not have: a restore and a fork have none.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from kvstore.commit.journal import NO_LINE, Entry, read_journal
from kvstore.errors import DamageError
from kvstore.format.manifest import TAKES_OVER, Manifest, Turn
from kvstore.format.records import AgentRef
from kvstore.history.resolve import lineage
from kvstore.naming import Ref
from kvstore.reader import Reader

REF_DIGITS = 16  # of a digest, in a REF that is shown


@dataclass(frozen=True)
class Commit:
    """One state of an agent, and what it added to the state before."""

    agent: str  # its name
    digest: str
    manifest: Manifest
    turns: tuple[Turn, ...]
    origin: str | None  # the state that a fork or a restore took over, as a REF where its agent is still there
    note: str | None
    snapshots: tuple[str, ...]
    forks: tuple[str, ...]  # agents that began as forks of this state

    @property
    def parent(self) -> str | None:
        """The digest of the state before, or of the one that a fork took over."""
        return self.manifest.previous or self.manifest.resumes


@dataclass(frozen=True)
class JournalHead:
    """How far a journal goes: kept elsewhere, it proves later that nothing was cut off or altered since.

    `digest` is the SHA-256 of the last line without its newline; the next line holds it.
    """

    entries: int
    bytes: int
    digest: str


class Chronicle:
    """The commits of the agents of one domain."""

    def __init__(self, reader: Reader, domain_id: str) -> None:
        """Read the domain's refs and histories. Raises DamageError."""
        self._reader = reader
        everyone = reader.agents()
        self._names = {agent.id: agent.name for agent in everyone}
        self._agents = [agent for agent in everyone if agent.domain == domain_id]
        self._notes = _notes(reader.layout.journal)
        self._forks: dict[str, list[str]] = defaultdict(list)
        for agent in self._agents:
            *_, (_, first) = lineage(reader, agent)
            if first.op == "fork" and first.resumes:
                self._forks[first.resumes].append(agent.name)

    def commits(self, agent: AgentRef) -> Iterator[Commit]:
        """The history of one agent, newest first. Raises DamageError."""
        snapshots: dict[str, list[str]] = defaultdict(list)
        for snapshot in self._reader.snapshots(agent.name):
            snapshots[snapshot.manifest].append(snapshot.name)
        for digest, manifest in lineage(self._reader, agent):
            taken = manifest.resumes if manifest.op in TAKES_OVER else None
            before = self._kept(manifest.domain, taken or manifest.previous)
            yield Commit(
                agent=agent.name,
                digest=digest,
                manifest=manifest,
                turns=_added(manifest, before),
                origin=self._origin(taken, before),
                note=self._notes.get((manifest.agent, digest)),
                snapshots=tuple(snapshots[digest]),
                forks=tuple(self._forks[digest]),
            )

    def all(self) -> list[Commit]:
        """The histories of all agents of the domain, newest first."""
        commits = [commit for agent in self._agents for commit in self.commits(agent)]
        return sorted(commits, key=lambda commit: commit.manifest.created, reverse=True)

    def _kept(self, domain_id: str, digest: str | None) -> Manifest | None:
        if digest is None or not self._reader.has_manifest(domain_id, digest):
            return None
        return self._reader.manifest(domain_id, digest)

    def _origin(self, digest: str | None, manifest: Manifest | None) -> str | None:
        if digest is None:
            return None
        name = self._names.get(manifest.agent) if manifest else None
        return str(Ref(name, digest=digest[:REF_DIGITS])) if name else f"sha256:{digest[:REF_DIGITS]}"


def _added(manifest: Manifest, before: Manifest | None) -> tuple[Turn, ...]:
    old = before.turns if before else ()
    same = 0
    while same < min(len(old), len(manifest.turns)) and old[same] == manifest.turns[same]:
        same += 1
    return manifest.turns[same:]


def _notes(journal: Path) -> dict[tuple[str, str], str]:
    """What `--note` said of states, by agent id and digest. A damaged journal does not prevent reading a history."""
    notes: dict[tuple[str, str], str] = {}
    with suppress(DamageError):
        for entry in read_journal(journal):
            if entry.change.note and entry.change.after:
                notes[entry.change.agent_id, entry.change.after] = entry.change.note
    return notes


def journal_between(journal: Path, since: datetime | None, until: datetime | None) -> list[Entry]:
    """The journal's entries of a span of time, both ends included, newest first. Raises DamageError."""
    entries = [
        entry
        for entry in read_journal(journal)
        if (since is None or datetime.fromisoformat(entry.time) >= since)
        and (until is None or datetime.fromisoformat(entry.time) <= until)
    ]
    return entries[::-1]


def journal_head(journal: Path) -> JournalHead:
    """How far a journal goes, its chain checked. Raises DamageError."""
    head = JournalHead(0, 0, NO_LINE)
    for entry in read_journal(journal):
        head = JournalHead(entry.seq, head.bytes + len(entry.line()), entry.digest)
    return head
