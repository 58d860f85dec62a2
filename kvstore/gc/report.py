"""Report a collection: what happened to each object, why, and which agents it belonged to."""

from collections import defaultdict
from collections.abc import Container, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from kvstore.commit.staging import RUNNING
from kvstore.errors import AmemError
from kvstore.format.kinds import AGENT, DOMAIN, MANIFEST, SNAPSHOT, StoredObject
from kvstore.format.layout import StoreLayout
from kvstore.format.references import named_by
from kvstore.gc.plan import GCPlan
from kvstore.gc.sweep import Sweep
from kvstore.graph.objects import size_of
from kvstore.graph.roots import Root
from kvstore.graph.walk import named_by_object
from kvstore.reader import Reader

Action = Literal["deleted", "evicted", "kept", "failed"]


@dataclass(frozen=True, slots=True)
class Collected:
    """What gc did with an object, a folder, an agent or a foreign file.

    `reason` says why: history (before the kept states), evicted, removed (with its agent), unnamed (by any state: a
    commit was cut off), dead-writer, empty, unused (hence an eviction), in-use, foreign, or why it failed. `held_by`:
    the refs that keep a part of an evicted agent, or what uses it.
    """

    action: Action
    reason: str
    kind: str  # manifest, page, tail, block, snapshot, staging, domain, agent, file
    name: str  # a SHA-256, an id, an agent's name, or a path in the store
    agents: tuple[str, ...]
    held_by: tuple[str, ...]
    bytes: int


class FormerOwners:
    """The agents that garbage belonged to, as far as manifests that are garbage themselves show."""

    def __init__(self, reader: Reader, plan: GCPlan, evicted: Container[str]) -> None:
        self._reader = reader
        self._evicted = evicted
        self._names: Mapping[str, str] = {root.agent_id: root.agent for root in plan.roots}
        self._agents: dict[tuple[str, StoredObject], set[str]] = defaultdict(set)  # → ids
        for domain_id, objects in plan.garbage.items():
            self._find(domain_id, objects)

    def of(self, domain_id: str, found: StoredObject) -> tuple[str, tuple[str, ...]]:
        """Why it is garbage, and the names of the existing agents that it belonged to."""
        ids = self._agents.get((domain_id, found), set())
        names = tuple(sorted(self._names[agent_id] for agent_id in ids & self._names.keys()))
        if not ids:
            return "unnamed", names
        if not names:
            return "removed", names
        return "evicted" if any(agent_id in self._evicted for agent_id in ids) else "history", names

    def _find(self, domain_id: str, garbage: Mapping[StoredObject, int]) -> None:
        for own in [found for found in garbage if found.kind is MANIFEST]:
            with suppress(AmemError):  # a damaged manifest names nothing
                manifest = self._reader.manifest(domain_id, own.sha256)
                for found in (own, *(named.object for named in named_by(manifest) if named.object in garbage)):
                    self._agents[domain_id, found].add(manifest.agent)
        for outer in list(garbage):
            with suppress(AmemError):
                for named in named_by_object(self._reader, domain_id, outer):
                    if named.object in garbage:
                        self._agents[domain_id, named.object] |= self._agents.get((domain_id, outer), set())


def report_garbage(layout: StoreLayout, plan: GCPlan, owners: FormerOwners, sweep: Sweep | None) -> Iterator[Collected]:
    """What happened to the garbage of a plan, or (no sweep) what would."""
    failed = sweep.failed if sweep else {}
    reported = set()
    for domain_id, garbage in plan.garbage.items():
        for found, size in garbage.items():
            reason, agents = owners.of(domain_id, found)
            path = layout.object(domain_id, *found)
            action: Action = "failed" if path in failed else "deleted"
            reported |= {path} if path in failed else set()
            yield Collected(action, failed.get(path, reason), found.kind.name, found.sha256, agents, (), size)
    for domain_id, found in sorted(sweep.pinned if sweep else ()):
        size = size_of(layout, domain_id, found)
        yield Collected("kept", "in-use", found.kind.name, found.sha256, (), (RUNNING,), size)
    for path, size in (sweep.removed if sweep else plan.removable(layout)).items():
        kind, reason = SNAPSHOT.name, "removed"
        if path.parent == layout.staging:
            kind, reason = "staging", "dead-writer"
        elif path.parent == layout.domains:
            kind, reason = DOMAIN.name, "empty"
        yield Collected("deleted", reason, kind, path.name, (), (), size)
    for path in [path for path in failed if path not in reported]:  # folders
        yield Collected("failed", failed[path], "file", str(path.relative_to(layout.root)), (), (), 0)


def report_foreign(layout: StoreLayout, plan: GCPlan) -> Iterator[Collected]:
    """Files that do not belong into a store. They are never deleted."""
    for path in sorted(plan.foreign):
        yield Collected("kept", "foreign", "file", str(path.relative_to(layout.root)), (), (), 0)


def report_eviction(plan: GCPlan, root: Root) -> Collected:
    """An evicted agent: the bytes that only it held, and who holds the rest."""
    held_by = tuple(sorted(map(str, plan.held_by[root])))
    return Collected("evicted", "unused", AGENT.name, root.agent, (root.agent,), held_by, plan.owned[root])
