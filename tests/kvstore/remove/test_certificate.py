"""Certificates of erasure can be checked again, and show what came back."""

from pathlib import Path

import pytest

from kvstore.commit.index import Index
from kvstore.disk.canonical_json import dump
from kvstore.errors import ConflictError, DamageError, UsageError
from kvstore.format.document import replace
from kvstore.format.kinds import BLOCK
from kvstore.naming import Ref
from kvstore.remove.certificate import Certificate, check_erased, read_certificates
from kvstore.remove.remove import remove
from kvstore.store import Store
from tests.support.making import ACTOR


class TestCertificates:
    @pytest.fixture
    def certificate(self, forked: Store) -> Certificate:
        found = remove(forked, Ref("a"), wait=0, erase=True).certificate
        assert found
        return found

    def test_they_are_read_back(self, certificate: Certificate) -> None:
        line = dump(certificate.document())
        assert read_certificates(line) == [certificate]
        assert read_certificates(line + b"\n" + line + b"\n") == [certificate] * 2
        assert read_certificates(dump({"type": "result", "certificates": [certificate.document()]})) == [certificate]
        for wrong in (b"", b"{}", b"nonsense", b'{"certificates":[]}'):
            with pytest.raises(UsageError):
                read_certificates(wrong)
        with pytest.raises(DamageError):
            read_certificates(line.replace(certificate.domain.encode(), b"0" * 32))

    def test_they_hold_no_names(self, certificate: Certificate) -> None:
        assert b'"a"' not in dump(certificate.document())

    def test_one_of_another_store_is_refused(self, certificate: Certificate, tmp_path: Path) -> None:
        with pytest.raises(ConflictError):
            check_erased(Store.open_or_create(tmp_path / "other", ACTOR), certificate)

    def test_a_file_that_came_back_is_found(self, forked: Store, certificate: Certificate) -> None:
        kind, _, digest = certificate.erased[-1].partition(" sha256:")
        assert kind == "block"
        path = forked.layout.object(certificate.domain, BLOCK, digest)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
        assert [remains.object for remains in check_erased(forked, certificate)] == [certificate.erased[-1]]

    def test_a_ref_that_came_back_is_found(self, forked: Store, certificate: Certificate) -> None:
        ref = forked.layout.agent_ref("b")
        ref.write_text(ref.read_text().replace(forked.agent("b").id, certificate.agents[0]))
        assert any(remains.object == "agent b" for remains in check_erased(forked, certificate))

    def test_a_staged_file_is_found(self, forked: Store, certificate: Certificate) -> None:
        digest = certificate.erased[0].partition("sha256:")[2]
        folder = forked.layout.transaction("f" * 32)
        folder.mkdir()
        (folder / digest).write_bytes(b"")
        assert [remains.message for remains in check_erased(forked, certificate)] == [
            "is a staged copy of an erased object"
        ]

    def test_an_index_row_is_found(self, forked: Store, certificate: Certificate) -> None:
        block = next(text for text in certificate.erased if text.startswith("block "))
        state = forked.resolve(Ref("b")).manifest
        row = replace(forked.blocks(state)[0], sha256=block.partition("sha256:")[2])
        Index(forked.layout).add(certificate.domain, [row])
        [remains] = check_erased(forked, certificate)
        assert remains.message == "has a row in the index"

    def test_a_journal_without_the_erasure_is_found(self, forked: Store, certificate: Certificate) -> None:
        lines = forked.layout.journal.read_bytes().splitlines(keepends=True)
        forked.layout.journal.write_bytes(b"".join(lines[:-1]))
        messages = [remains.message for remains in check_erased(forked, certificate)]
        assert len(messages) == 2
        assert all("erase" in message or "erasure" in message for message in messages)
