"""Certificates of erasure: what was erased, in a form that can be checked again later.

A certificate holds ids and digests, never names. Once the domain's salt is destroyed none of its digests can be
tested against a guessed text. It carries the SHA-256 of itself, and the journal's head right after the erasure, so
that neither can be altered without the other.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal

from kvstore.commit import refs
from kvstore.commit.index import Index
from kvstore.commit.journal import Entry, read_journal
from kvstore.disk.canonical_json import dump, load
from kvstore.errors import ConflictError, DamageError, UsageError
from kvstore.format.document import Count, Document, Id, Sha256, as_dict, from_values, place_of
from kvstore.format.kinds import BLOCK, MANIFEST, StoredObject, kind_named
from kvstore.format.layout import StoreLayout
from kvstore.graph.roots import agent_roots
from kvstore.graph.walk import Holders, own_history
from kvstore.reader import Reader
from kvstore.store import Store

_HINT = "use the one that `amem rm` printed"


class Certificate(Document, frozen=True):
    """One erasure. Objects are written `block sha256:HEX`; the others are manifests, pages and tails."""

    store: Id
    domain: Id
    domain_erased: bool  # its folder and its salt are gone
    agents: tuple[Id, ...]
    snapshots: tuple[str, ...]  # of an agent that stays, by the time of their journal line
    erased: tuple[str, ...]
    remaining: tuple[str, ...]  # what others need, and what could not be erased
    journal_seq: Count  # of the erasure's last line
    journal_head: Sha256  # that line's digest
    time: str
    format: Literal[1] = 1

    def document(self) -> dict[str, Any]:
        """The certificate as JSON has it, its own SHA-256 included."""
        values = as_dict(self)
        return {**values, "sha256": sha256(dump(values)).hexdigest()}


@dataclass(frozen=True)
class Remains:
    """An object that a certificate calls erased and that exists."""

    object: str
    message: str


def read_certificates(data: bytes) -> list[Certificate]:
    """The certificates in a file: one JSON object a line, or one in all; the output of `rm --json` too.

    Raises UsageError for anything else, and DamageError for a certificate that was altered.
    """
    whole = load(data)
    documents = [whole] if whole is not None else [load(line) for line in data.splitlines() if line.strip()]
    found = [certificate for document in documents for certificate in _certificates(document)]
    if not found:
        raise UsageError("the file holds no certificate", "`amem rm --erase` prints one")
    return found


def _certificates(document: dict[str, Any] | None) -> Iterator[Certificate]:
    if document is None:
        raise UsageError("this is not a certificate of erasure", "`amem rm --erase` prints one")
    if isinstance(document.get("certificates"), list):
        for inner in document["certificates"]:
            yield from _certificates(inner)
    elif "journal_head" in document:
        yield _read(document)


def _read(document: dict[str, Any]) -> Certificate:
    values = dict(document)
    own = values.pop("sha256", None)
    if sha256(dump(values)).hexdigest() != own:
        raise DamageError("the certificate was altered: its SHA-256 differs", _HINT)
    try:
        return from_values(values, Certificate)
    except ValueError as error:
        raise DamageError(f"the certificate is malformed{place_of(error)}", _HINT) from error


def check_erased(store: Store, certificate: Certificate) -> list[Remains]:
    """Prove an erasure again. Returns what contradicts the certificate.

    Checks files, staged files, refs, snapshots, what the remaining refs reach, index rows and the journal; writes
    nothing and takes no lock. Raises ConflictError for a certificate of another store, DamageError where the remaining
    states cannot be read.
    """
    if certificate.store != store.id:
        raise ConflictError(f"the certificate is of store {certificate.store}", f"this one is {store.id}")
    layout = store.layout
    erased = {_parse(text) for text in certificate.erased}
    return [
        *_journal(layout, certificate),
        *(Remains(str(o), "still exists") for o in sorted(erased) if layout.object(certificate.domain, *o).exists()),
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
    name, _, digest = text.partition(" sha256:")
    kind = kind_named(name)
    if kind is None:
        raise DamageError("the certificate names an unknown kind of object", _HINT)
    return StoredObject(kind, digest)


def _standing(layout: StoreLayout) -> Iterator[Entry]:
    """The journal's entries without those that a `void` line takes back: a crash cut them off."""
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
        yield Remains("journal", f"no line says that agent {agent} was erased")
    if certificate.domain_erased and not domain_erased:
        yield Remains("journal", f"no line says that domain {certificate.domain} was erased")


def _staged(layout: StoreLayout, digests: set[str]) -> Iterator[Remains]:
    for path in sorted(layout.staging.glob("*/*")):
        if path.name in digests:
            yield Remains(f"staging/{path.parent.name}/{path.name}", "is a staged copy of an erased object")


def _refs(layout: StoreLayout, certificate: Certificate, erased: set[StoredObject]) -> Iterator[Remains]:
    states = {found.sha256 for found in erased if found.kind is MANIFEST}
    for agent in refs.read_agents(layout):
        if agent.id in certificate.agents or agent.manifest in states:
            yield Remains(f"agent {agent.name}", "names an erased state")
    for folder in sorted(layout.snapshot_refs.iterdir()):
        for snapshot in refs.read_snapshots(layout, folder.name):
            if (
                snapshot.agent_id in certificate.agents
                or snapshot.manifest in states
                or (snapshot.created in certificate.snapshots and snapshot.domain == certificate.domain)
            ):
                yield Remains(f"snapshot {snapshot.agent}@{snapshot.name}", "names an erased state")
    if certificate.domain_erased and layout.domain(certificate.domain).exists():
        yield Remains(f"domain {certificate.domain}", "its folder still exists")


def _reached(reader: Reader, certificate: Certificate, erased: set[StoredObject]) -> Iterator[Remains]:
    """Erased objects that the remaining refs reach through manifests and pages."""
    for agent in reader.agents():
        if agent.domain != certificate.domain or agent.id in certificate.agents:
            continue
        holders = Holders(reader, agent.domain)
        holders.add(agent.name, own_history(agent.id), [root.manifest for root in agent_roots(reader, agent)])
        for found in sorted(erased & holders.of.keys()):
            yield Remains(str(found), f"is reachable from agent {agent.name}")


def _indexed(layout: StoreLayout, certificate: Certificate, erased: set[StoredObject]) -> Iterator[Remains]:
    listed = Index(layout).listed(certificate.domain)
    if listed is None:
        yield Remains("index.sqlite", "cannot be read, so it is not proven that it holds no row of what was erased")
        return
    blocks = {found.sha256 for found in erased if found.kind is BLOCK}
    for digest in sorted(listed if certificate.domain_erased else listed & blocks):
        yield Remains(str(StoredObject(BLOCK, digest)), "has a row in the index")
