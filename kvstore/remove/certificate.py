"""Certificates of erasure: what was erased, said so that it can be checked again later.

A certificate holds ids and digests, never names. Once the domain's salt is destroyed none of its digests can be
tested against a guessed text. It carries the SHA-256 of itself, and the journal's head right after the erasure, so
that neither can be altered without the other.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from typing import Any

from kvstore.commit import refs
from kvstore.commit.index import Index
from kvstore.commit.journal import Entry, read_journal
from kvstore.disk.canonical_json import dump, load
from kvstore.errors import ConflictError, DamageError, UsageError
from kvstore.format.layout import StoreLayout
from kvstore.graph.objects import StoredObject
from kvstore.graph.walk import Reach
from kvstore.reader import Reader
from kvstore.store import Store


@dataclass(frozen=True)
class Certificate:
    """One erasure. Objects are written `block sha256:HEX`; the others are manifests, pages and tails."""

    store: str  # ids
    domain: str
    domain_erased: bool  # its folder and its salt are gone
    agents: tuple[str, ...]  # ids
    snapshots: tuple[str, ...]  # of an agent that stays, by the time of their journal line
    erased: tuple[str, ...]
    remaining: tuple[str, ...]  # what others need, and what could not be erased
    journal_seq: int  # of the erasure's last line
    journal_head: str  # that line's digest
    time: str
    format: int = 1

    def document(self) -> dict[str, Any]:
        """The certificate as JSON has it, its own SHA-256 included."""
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        return {**values, "sha256": sha256(dump(values)).hexdigest()}


@dataclass(frozen=True)
class Remains:
    """Something that a certificate says is gone, and that is there."""

    object: str
    message: str


def read_certificates(data: bytes) -> list[Certificate]:
    """The certificates in a file: one JSON object a line, or one in all; `rm --json` results will do, too.

    Raises UsageError for anything else, and DamageError for a certificate that was altered.
    """
    whole = load(data)
    documents = [whole] if whole is not None else [load(line) for line in data.splitlines() if line.strip()]
    found = [certificate for document in documents for certificate in _certificates(document)]
    if not found:
        raise UsageError("there is no certificate in that file", "`amem rm --erase` prints one")
    return found


def _certificates(document: dict[str, Any] | None) -> Iterator[Certificate]:
    if document is None:
        raise UsageError("that is no certificate of erasure", "`amem rm --erase` prints one")
    if isinstance(document.get("certificates"), list):
        for inner in document["certificates"]:
            yield from _certificates(inner)
    elif "journal_head" in document:
        yield _read(document)


def _read(document: dict[str, Any]) -> Certificate:
    values = dict(document)
    own = values.pop("sha256", None)
    if sha256(dump(values)).hexdigest() != own or set(values) != {field.name for field in fields(Certificate)}:
        raise DamageError("the certificate was altered: its SHA-256 differs", "use the one that `amem rm` printed")
    lists: dict[str, Any] = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return Certificate(**{**values, **lists})


def check_erased(store: Store, certificate: Certificate) -> list[Remains]:
    """Prove an erasure again: what contradicts the certificate; nothing where it holds.

    Files, staged files, refs, snapshots, what the refs that are left lead to, index rows and the journal are looked
    at; nothing is written and no lock is taken. Raises ConflictError for a certificate of another store, DamageError
    where what is left cannot be read.
    """
    if certificate.store != store.id:
        raise ConflictError(f"the certificate is of store {certificate.store}", f"this one is {store.id}")
    layout = store.layout
    erased = {_parse(text) for text in certificate.erased}
    return [
        *_journal(layout, certificate),
        *(Remains(str(o), "is there") for o in sorted(erased) if o.path(layout, certificate.domain).exists()),
        *_staged(layout, {o.sha256 for o in erased}),
        *_refs(layout, certificate, erased),
        *_reached(store, certificate, erased),
        *_indexed(layout, certificate, erased),
    ]


def is_erased(layout: StoreLayout, agent_id: str, domain_id: str) -> bool:
    """Whether an agent, or a domain, of that id was erased from this store. Raises DamageError."""
    return any(
        (entry.change.op, entry.change.agent_id) == (refs.ERASE, agent_id)
        or (entry.change.op, entry.change.domain_id) == (refs.ERASE_DOMAIN, domain_id)
        for entry in _standing(layout)
    )


def _parse(text: str) -> StoredObject:
    kind, _, digest = text.partition(" sha256:")
    return StoredObject(f"{kind}s", digest)


def _standing(layout: StoreLayout) -> Iterator[Entry]:
    """The journal's entries without those that were voided at once: a crash cut them off."""
    last: Entry | None = None
    for entry in read_journal(layout.journal):
        if last and entry.change.op != "void":
            yield last
        last = None if entry.change.op == "void" else entry
    if last:
        yield last


def _journal(layout: StoreLayout, certificate: Certificate) -> Iterator[Remains]:
    wanted = set(certificate.agents)
    head = None
    domain_erased = False
    for entry in _standing(layout):
        if entry.seq > certificate.journal_seq:
            break
        if entry.seq == certificate.journal_seq:
            head = entry.digest
        if entry.change.op == refs.ERASE:
            wanted.discard(entry.change.agent_id)
        domain_erased |= (entry.change.op, entry.change.domain_id) == (refs.ERASE_DOMAIN, certificate.domain)
    if head != certificate.journal_head:
        yield Remains("journal", f"its line {certificate.journal_seq} is not that of the erasure")
    for agent in sorted(wanted):
        yield Remains("journal", f"it does not tell that agent {agent} was erased")
    if certificate.domain_erased and not domain_erased:
        yield Remains("journal", f"it does not tell that domain {certificate.domain} was erased")


def _staged(layout: StoreLayout, digests: set[str]) -> Iterator[Remains]:
    for path in sorted(layout.staging.glob("*/*")):
        if path.name in digests:
            yield Remains(f"staging/{path.parent.name}/{path.name}", "holds what was erased")


def _refs(layout: StoreLayout, certificate: Certificate, erased: set[StoredObject]) -> Iterator[Remains]:
    states = {found.sha256 for found in erased if found.kind == "manifests"}
    for agent in refs.read_agents(layout):
        if agent.id in certificate.agents or agent.manifest in states:
            yield Remains(f"agent {agent.name}", "leads to what was erased")
    for folder in sorted(layout.snapshot_refs.iterdir()):
        for snapshot in refs.read_snapshots(layout, folder.name):
            if (
                snapshot.agent_id in certificate.agents
                or snapshot.manifest in states
                or (snapshot.created in certificate.snapshots and snapshot.domain == certificate.domain)
            ):
                yield Remains(f"snapshot {snapshot.agent}@{snapshot.name}", "leads to what was erased")
    if certificate.domain_erased and layout.domain(certificate.domain).exists():
        yield Remains(f"domain {certificate.domain}", "its folder is there")


def _reached(reader: Reader, certificate: Certificate, erased: set[StoredObject]) -> Iterator[Remains]:
    """What refs that are left lead to by way of manifests and pages."""
    for agent in reader.agents():
        if agent.domain != certificate.domain or agent.id in certificate.agents:
            continue
        reach = Reach(reader, agent.domain)
        reach.mark(agent.name, agent.id, [agent.manifest, *(s.manifest for s in reader.snapshots(agent.name))])
        for found in sorted(erased & reach.holders.keys()):
            yield Remains(str(found), f"agent {agent.name} leads to it")


def _indexed(layout: StoreLayout, certificate: Certificate, erased: set[StoredObject]) -> Iterator[Remains]:
    listed = Index(layout).listed(certificate.domain)
    if listed is None:
        yield Remains("index.sqlite", "cannot be read, so it is not proven that it holds no row of what was erased")
        return
    blocks = {found.sha256 for found in erased if found.kind == "blocks"}
    for sha in sorted(listed if certificate.domain_erased else listed & blocks):
        yield Remains(f"block sha256:{sha}", "has a row in the index")
