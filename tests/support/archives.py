"""Archives made, taken apart and packed again, as an attacker would."""

import io
import json
import tarfile
from hashlib import sha256

from kvstore.archive.export import exporting
from kvstore.archive.import_agent import ImportedAgent, import_agent
from kvstore.archive.tar import LISTING
from kvstore.disk.canonical_json import dump
from kvstore.naming import parse_ref
from kvstore.store import Store


def exported(store: Store, ref: str, *, lineage: bool = False) -> bytes:
    with exporting(store, parse_ref(ref), lineage=lineage) as export:
        data = b"".join(export.pieces)
        assert len(data) == export.size
    return data


def imported(store: Store, data: bytes, name: str | None = None, **options: object) -> ImportedAgent:
    return import_agent(store, io.BytesIO(data), name, **options)  # type: ignore[arg-type]


def unpacked(data: bytes) -> list[tuple[str, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        members = []
        for member in tar:
            file = tar.extractfile(member)
            assert file
            members.append((member.name, file.read()))
    return members


def packed(members: list[tuple[str, bytes]]) -> bytes:
    """An archive of these members, listed as they follow."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in members:
            if name == LISTING:
                values = json.loads(content)
                values["files"] = [{"path": path, "bytes": len(body)} for path, body in members if path != LISTING]
                del values["sha256"]
                content = dump({**values, "sha256": sha256(dump(values)).hexdigest()})
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), 0o600
            tar.addfile(info, io.BytesIO(content))
    padded = out.getvalue()
    return padded[: len(padded.rstrip(b"\0")) + -len(padded.rstrip(b"\0")) % 512 + 1024]


def files_below(store: Store) -> dict[str, bytes]:
    root = store.layout.domains
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
