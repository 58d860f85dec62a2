"""Archives that are altered, cut short, or malicious: none of them is imported, even in part."""

import json
import tarfile
from collections.abc import Callable
from hashlib import sha256

import pytest

from kvstore.archive.tar import LISTING
from kvstore.disk.canonical_json import dump
from kvstore.errors import AmemError, DamageError, IsolationError, NoStoreError, UsageError
from kvstore.format.document import replace
from kvstore.store import Store
from tests.support.archives import exported, files_below, imported, packed, unpacked
from tests.support.making import commit

Change = Callable[[list[tuple[str, bytes]]], list[tuple[str, bytes]]]


def without_last(members: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    return members[:-1]


def with_stranger(members: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    content = b"x" * 100
    return [*members, (f"blocks/{sha256(content).hexdigest()}.safetensors", content)]


def renamed(path: str) -> Change:
    return lambda members: [*members[:-1], (path, members[-1][1])]


def twice(members: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    return [*members, members[-1]]


def out_of_order(members: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    return [members[0], *members[:0:-1]]


def relisted(**values: object) -> Change:
    def change(members: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
        return [(LISTING, dump({**json.loads(members[0][1]), **values})), *members[1:]]

    return change


@pytest.mark.parametrize(
    "change",
    [
        without_last,
        with_stranger,
        twice,
        out_of_order,
        renamed("/etc/passwd"),
        renamed("../../escape"),
        renamed("blocks/../../../escape.safetensors"),
        renamed(f"blocks/{'0' * 64}.safetensors"),
        renamed(f"domains/{'0' * 64}.json"),
        relisted(agent="../a"),
        relisted(agent_id="../../refs"),
        relisted(agent_id=7),
        relisted(head="0" * 64),
        relisted(snapshots=[{"name": "s", "manifest": "0" * 64, "note": None, "created": ""}]),
        relisted(snapshots=[{"name": ".", "manifest": "0" * 64, "note": None, "created": ""}]),
        relisted(snapshots=7),
        relisted(more=1),
        relisted(domain={"id": "../..", "name": None, "salt": "0" * 64, "created": ""}),
        relisted(domain={"id": "0" * 32, "name": None, "salt": "0" * 64, "created": ""}),
    ],
)
def test_a_malformed_archive_is_refused(agent: Store, other: Store, change: Change) -> None:
    data = packed(change(unpacked(exported(agent, "a"))))
    with pytest.raises(DamageError):
        imported(other, data)
    assert other.agents() == []
    assert files_below(other) == {}
    assert list(other.layout.staging.iterdir()) == []


def test_another_version_is_told_apart(agent: Store, other: Store) -> None:
    with pytest.raises(NoStoreError, match="another version"):
        imported(other, packed(relisted(format=2)(unpacked(exported(agent, "a")))))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE])
def test_links_devices_and_folders_are_refused(agent: Store, other: Store, kind: bytes) -> None:
    data = bytearray(exported(agent, "a"))
    at = data.rindex(b"blocks/")
    info = tarfile.TarInfo.frombuf(bytes(data[at : at + 512]), "utf-8", "strict")
    info.type, info.linkname = kind, "/etc/passwd"
    data[at : at + 512] = info.tobuf(tarfile.USTAR_FORMAT)
    with pytest.raises(DamageError):
        imported(other, bytes(data))


def test_truncated_and_trailing_bytes_are_refused(agent: Store, other: Store) -> None:
    data = exported(agent, "a~2")
    for cut in (*range(0, 3000, 307), len(data) // 2, len(data) - 1024, len(data) - 1):
        with pytest.raises(DamageError):
            imported(other, data[:cut])
    for more in (b"\0", b"x", bytes(512), data):
        with pytest.raises(DamageError):
            imported(other, data + more)
    assert (other.agents(), files_below(other)) == ([], {})
    imported(other, data)


def test_any_flipped_bit_is_noticed(store: Store, other: Store) -> None:
    commit(store, "a", range(300))
    data = exported(store, "a")
    for place in {*range(0, len(data), 1009), *range(0, 1024, 101)}:
        altered = bytearray(data)
        altered[place] ^= 1
        with pytest.raises(AmemError):
            imported(other, bytes(altered))
    assert other.agents() == []


def edited(store: Store, kind: str, change: Callable[[dict[str, object]], None]) -> bytes:
    """An archive with one document altered, and all digests above it made to fit."""
    members = unpacked(exported(store, "a"))
    names: dict[str, str] = {}

    def rename(content: bytes) -> bytes:
        for old, new in names.items():
            content = content.replace(old.encode(), new.encode())
        return content

    for wanted in ("pages", "manifests"):
        for place, (path, content) in enumerate(members):
            if not path.startswith(wanted):
                continue
            values = json.loads(rename(content))
            if wanted == kind:
                change(values)
            content = dump(values)
            digest = sha256(content).hexdigest()
            names[path.split("/")[1].split(".")[0]] = digest
            members[place] = (f"{wanted}/{digest}.json", content)
    return packed([(members[0][0], rename(members[0][1])), *members[1:]])


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("manifests", {"cached": 256}),
        ("manifests", {"cached": -1}),
        ("manifests", {"cached": "many"}),
        ("manifests", {"tokens": 5}),
        ("manifests", {"salt": "0" * 64}),
        ("manifests", {"domain": "0" * 32}),
        ("manifests", {"tail": None}),
        ("manifests", {"window_blocks": []}),
        ("manifests", {"groups": []}),
        ("manifests", {"pages": []}),
        ("manifests", {"model": {"name": "m", "fingerprint": "../../x", "parts": {}}}),
        ("manifests", {"codec": {"name": "q4-channel", "bits": 8, "key_axis": "token", "value_axis": "channel"}}),
        ("manifests", {"turns": [{"role": "user", "start": 0, "end": 99999, "label": None}]}),
        ("pages", {"start": 4096}),
        ("pages", {"salt": "0" * 64}),
        ("pages", {"blocks": []}),
        ("pages", {"tokens": []}),
    ],
)
def test_documents_that_do_not_fit_together_are_refused(
    agent: Store, other: Store, kind: str, values: dict[str, object]
) -> None:
    assert imported(other, edited(agent, kind, lambda _: None), "unchanged").tokens == 1000
    with pytest.raises(DamageError):
        imported(other, edited(agent, kind, lambda document: document.update(values)), "b", as_new=True)
    assert [found.name for found in other.agents()] == ["unchanged"]


def test_other_tokens_than_the_blocks_hold_are_refused(agent: Store, other: Store) -> None:
    def swap(page: dict[str, object]) -> None:
        tokens = page["tokens"]
        assert isinstance(tokens, list)
        tokens[5] = 77

    with pytest.raises(DamageError, match=r"prefix key|row says"):
        imported(other, edited(agent, "pages", swap))


def test_another_salt_under_a_known_id_is_a_breach(agent: Store, other: Store) -> None:
    data = exported(agent, "a")
    home = agent.domain(agent.agent("a").domain)
    other.adopt_domain(replace(home, name="x", salt="0" * 64))
    with pytest.raises(IsolationError):
        imported(other, data)


@pytest.mark.parametrize("data", [b"", b"x" * 5000, bytes(10240), b"\x1f\x8b" + bytes(2000)])
def test_what_is_no_archive_is_refused(other: Store, data: bytes) -> None:
    with pytest.raises(DamageError):
        imported(other, data)


def test_a_bad_name_is_refused(agent: Store, other: Store) -> None:
    with pytest.raises(UsageError):
        imported(other, exported(agent, "a"), "../b")
