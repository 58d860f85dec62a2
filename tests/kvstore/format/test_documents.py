"""Every JSON document of a store is decoded strictly: a wrong type or bound is damage or a usage error, never a bug."""

import io
import json
from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import Any

import pytest

from kvstore.archive.export import exporting
from kvstore.archive.tar import Archive
from kvstore.commit import refs
from kvstore.commit.journal import parse_line, read_journal
from kvstore.errors import AmemError, DamageError, NoStoreError, UsageError
from kvstore.format.document import as_dict, encode
from kvstore.format.kinds import MANIFEST, PAGE, StoredObject
from kvstore.format.manifest import decode_manifest, decode_page, decode_page_blocks
from kvstore.lifecycle import snapshot
from kvstore.naming import Ref
from kvstore.remove.certificate import read_certificates
from kvstore.remove.remove import remove
from kvstore.store import Store
from tests.support.making import ACTOR, commit

WRONG: tuple[object, ...] = (None, True, -1, 0.5, 1 << 70, "", "../../x", "\ud800", [], [None], {}, {"x": [1]})
Decode = Callable[[bytes], object]


def leaves(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all values in a document, containers included."""
    yield place
    inner = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, each in inner:
        yield from leaves(each, (*place, key))


def changed(document: Any, place: tuple[Any, ...], value: object) -> Any:
    """A copy of a document with another value in one place."""
    if not place:
        return value
    copy = dict(document) if isinstance(document, dict) else list(document)
    copy[place[0]] = changed(copy[place[0]], place[1:], value)
    return copy


def dump(values: Any) -> bytes:
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


@pytest.fixture
def agent(store: Store) -> Store:
    commit(store, "a", range(600))
    snapshot(store, Ref("a"), "s", "a note")
    commit(store, "a", range(900))
    return store


def check(decode: Decode, document: Any, expected: tuple[type[AmemError], ...]) -> None:
    """Every wrong value in every place either is refused as `expected`, or is one that the field may have."""
    refused = 0
    for place in leaves(document):
        for value in WRONG:
            try:
                decode(dump(changed(document, place, value)))
            except expected:
                refused += 1
    for data in (b"", b"{", b"\xff", b"[]", b"null", b"[" * 5000, dump(document)[:-1], dump({**document, "x": 1})):
        with pytest.raises(expected):
            decode(data)
    assert refused > 8 * len(list(leaves(document)))


def test_manifests_and_pages(agent: Store) -> None:
    state = agent.resolve(Ref("a"))
    page = StoredObject(PAGE, state.manifest.pages[0].sha256)
    manifest = agent.read_object(state.agent.domain, StoredObject(MANIFEST, state.digest))
    check(decode_manifest, json.loads(manifest), (DamageError, NoStoreError))
    values = json.loads(agent.read_object(state.agent.domain, page))
    values["tokens"] = values["tokens"][:2]
    check(decode_page, values, (DamageError, NoStoreError))
    with pytest.raises(DamageError, match=r"\$\.blocks\[0\]\.bytes"):
        decode_page_blocks(dump(changed(values, ("blocks", 0, "bytes"), "many")))


@pytest.mark.parametrize("kind", ["agent", "snapshot", "domain"])
def test_refs_and_domains(agent: Store, kind: str) -> None:
    layout, home = agent.layout, agent.agent("a").domain
    path = {
        "agent": layout.agent_ref("a"),
        "snapshot": layout.snapshot_ref("a", "s"),
        "domain": layout.domain_file(home),
    }[kind]
    read: dict[str, Callable[[], object]] = {
        "agent": lambda: refs.read_agent(layout, "a"),
        "snapshot": lambda: refs.read_snapshot(layout, "a", "s"),
        "domain": lambda: refs.read_domain(layout, home),
    }

    def decode(data: bytes) -> object:
        path.write_bytes(data)
        return read[kind]()

    check(decode, json.loads(path.read_bytes()), (DamageError,))


def test_a_ref_that_is_not_canonical_is_damage(agent: Store) -> None:
    path = agent.layout.agent_ref("a")
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(DamageError):
        agent.agent("a")


def test_journal_lines(agent: Store) -> None:
    def decode(data: bytes) -> object:
        if (entry := parse_line(data)) is None:
            raise DamageError("refused")
        return entry

    entry = list(read_journal(agent.layout.journal))[-1]
    check(decode, as_dict(entry), (DamageError,))
    assert encode(entry) + b"\n" == entry.line()


def test_certificates(agent: Store) -> None:
    certificate = remove(agent, Ref("a"), 1, erase=True).certificate
    assert certificate is not None
    check(lambda data: read_certificates(data), certificate.document(), (DamageError, UsageError))


def test_a_forged_certificate_is_decoded_strictly(agent: Store) -> None:
    certificate = remove(agent, Ref("a"), 1, erase=True).certificate
    assert certificate is not None
    values = certificate.document()
    del values["sha256"]

    def sign(forged: dict[str, Any]) -> bytes:
        return dump({**forged, "sha256": sha256(dump(forged)).hexdigest()})

    refused = 0
    for place in list(leaves(values))[1:]:
        for wrong in WRONG:
            try:
                read_certificates(sign(changed(values, place, wrong)))
            except (DamageError, UsageError):
                refused += 1
    assert refused > 8 * len(list(leaves(values)))
    for name in ("store", "domain", "agents", "journal_seq", "journal_head"):
        with pytest.raises(DamageError, match="malformed"):
            read_certificates(sign({**values, name: "../../x"}))


def test_the_listing_of_an_archive(agent: Store) -> None:
    with exporting(agent, Ref("a"), lineage=True) as export:
        listing = export.contents.document()

    def decode(data: bytes) -> object:
        header = Archive.header_of_listing(len(data))
        return Archive(io.BytesIO(header + data + bytes(-len(data) % 512)))

    decode(dump(listing))
    check(decode, listing, (DamageError, NoStoreError))


def test_the_format_of_a_store(agent: Store) -> None:
    path = agent.layout.format
    values = json.loads(path.read_bytes())

    def decode(data: bytes) -> object:
        path.write_bytes(data)
        return Store.open(agent.layout.root, ACTOR)

    for place in leaves(values):
        for wrong in WRONG:
            path.write_bytes(dump(changed(values, place, wrong)))
            try:
                Store.open(agent.layout.root, ACTOR)
            except NoStoreError:
                continue
    path.write_bytes(dump(changed(values, ("id",), 7)))
    with pytest.raises(NoStoreError):
        Store.open(agent.layout.root, ACTOR)
