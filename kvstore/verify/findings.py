"""What a verification finds, and which agents are affected."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from kvstore.errors import AmemError, IsolationError
from kvstore.format.kinds import StoredObject
from kvstore.format.layout import StoreLayout
from kvstore.graph.walk import affected_agents
from kvstore.reader import Reader

Severity = Literal["damage", "breach"]
Kind = Literal[
    "missing", "altered", "foreign", "ref", "domain", "journal", "boundary", "mode", "link", "owner", "index", "erased"
]
ISOLATION: frozenset[Kind] = frozenset({"boundary", "mode", "link", "owner", "index"})


@dataclass(frozen=True)
class Finding:
    """One fault. `agents` are the names of the affected ones; `object` is a digest, a REF, an id, or a path."""

    severity: Severity  # breach: something of one domain, or of this user, is within another's reach
    kind: Kind
    object: str
    agents: tuple[str, ...]
    message: str


class Findings:
    """Faults as they come. Those of objects are reported once each; their agents are found in `all`."""

    def __init__(self) -> None:
        self._found: list[Finding] = []
        self._objects: dict[tuple[str, StoredObject], tuple[Severity, Kind, str]] = {}

    def add(self, severity: Severity, kind: Kind, what: str, message: str, agents: Iterable[str] = ()) -> None:
        self._found.append(Finding(severity, kind, what, tuple(sorted(agents)), message))

    def add_object(self, domain_id: str, found: StoredObject, severity: Severity, kind: Kind, message: str) -> None:
        known = self._objects.get((domain_id, found))
        if known is None or (known[0], severity) == ("damage", "breach"):
            self._objects[domain_id, found] = (severity, kind, message)

    def add_error(self, layout: StoreLayout, domain_id: str, found: StoredObject, error: AmemError) -> None:
        """What reading an object raised."""
        exists = layout.object(domain_id, *found).is_file()
        severity: Severity = "breach" if isinstance(error, IsolationError) else "damage"
        kind: Kind = "boundary" if severity == "breach" else "altered" if exists else "missing"
        self.add_object(domain_id, found, severity, kind, error.message)

    def all(self, reader: Reader) -> list[Finding]:
        """All faults, breaches first. A file that gc deleted meanwhile is none."""
        wanted: dict[str, set[StoredObject]] = defaultdict(set)
        for domain_id, found in self._objects:
            wanted[domain_id].add(found)
        agents = affected_agents(reader, wanted)
        found_all = list(self._found)
        for (domain_id, found), (severity, kind, message) in self._objects.items():
            names = agents.get((domain_id, found))
            if names or kind != "missing":
                found_all.append(Finding(severity, kind, f"sha256:{found.sha256}", tuple(sorted(names or ())), message))
        return sorted(found_all, key=lambda finding: (finding.severity, finding.kind, finding.object, finding.message))
