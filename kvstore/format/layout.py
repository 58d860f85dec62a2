"""The path of every file of a store. Files that are named by a user's name use it in lower case."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from kvstore.format.kinds import AGENT, DOMAIN, OBJECT_KINDS, SNAPSHOT, ObjectKind
from kvstore.naming import file_name


class StoreLayout(Struct, frozen=True):
    """The paths of the store at `root`. Nothing here touches the disk."""

    root: Path

    @property
    def format(self) -> Path:
        return self.root / "format.json"

    @property
    def journal(self) -> Path:
        return self.root / "journal.jsonl"

    @property
    def index(self) -> Path:
        return self.root / "index.sqlite"

    @property
    def ballast(self) -> Path:
        return self.root / "ballast"

    @property
    def staging(self) -> Path:
        return self.root / "staging"

    @property
    def staged_ref(self) -> Path:
        """The one temporary file of refs: they only move under the journal lock."""
        return self.staging / "ref"

    @property
    def domains(self) -> Path:
        return self.root / DOMAIN.folder

    @property
    def agent_refs(self) -> Path:
        return self.root / AGENT.folder

    @property
    def snapshot_refs(self) -> Path:
        return self.root / SNAPSHOT.folder

    @property
    def models(self) -> Path:
        return self.root / "models"

    @property
    def locks(self) -> Path:
        return self.root / "locks"

    def folders(self) -> list[Path]:
        """The folders that every store has, parents first."""
        return [
            self.locks,
            self.staging,
            self.domains,
            self.agent_refs.parent,
            self.agent_refs,
            self.snapshot_refs,
            self.models,
            self.model_names,
        ]

    def domain(self, domain_id: str) -> Path:
        return self.domains / domain_id

    def domain_file(self, domain_id: str) -> Path:
        return self.domain(domain_id) / str(DOMAIN.file)

    def domain_folders(self, domain_id: str) -> list[Path]:
        return [self.domain(domain_id) / kind.folder for kind in OBJECT_KINDS]

    def object(self, domain_id: str, kind: ObjectKind, sha256: str) -> Path:
        return self.domain(domain_id).joinpath(kind.folder, sha256[:2], kind.file_name(sha256))

    def objects_of(self, kind: ObjectKind) -> Iterator[Path]:
        """The files of one kind in all domains."""
        return self.domains.glob(f"*/{kind.folder}/*/*{kind.suffix}")

    def agent_ref(self, agent: str) -> Path:
        return self.agent_refs / file_name(agent)

    def snapshot_folder(self, agent: str) -> Path:
        return self.snapshot_refs / file_name(agent)

    def snapshot_ref(self, agent: str, snapshot: str) -> Path:
        return self.snapshot_folder(agent) / file_name(snapshot)

    @property
    def model_names(self) -> Path:
        return self.models / "names"

    def model_name(self, name: str) -> Path:
        return self.model_names / f"{file_name(name)}.json"

    def transaction(self, transaction_id: str) -> Path:
        return self.staging / transaction_id

    def lock(self, what: str) -> Path:
        """The lock of the `store`, of the `journal` or of the `domains`."""
        return self.locks / what

    def agent_lock(self, agent: str) -> Path:
        """Lock files are never unlinked, so an erased agent's name must not stay readable in theirs."""
        return self.locks / f"agent-{hashlib.sha256(file_name(agent).encode()).hexdigest()[:32]}"
