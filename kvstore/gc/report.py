"""What gc tells of each object: what became of it, why, and which agents it was of."""

from collections import defaultdict
from collections.abc import Container, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from kvstore.errors import AmemError
from kvstore.format.layout import StoreLayout
from kvstore.gc.survey import Survey
from kvstore.gc.sweep import Sweep
from kvstore.graph.objects import StoredObject, size_of
from kvstore.graph.roots import Root
from kvstore.graph.walk import direct
from kvstore.reader import Reader

RUNNING = "a command that is running"


@dataclass(frozen=True, slots=True)
class Handled:
    """What gc did with one object, folder, agent or foreign file; in a dry run, what it would do.

    `action`: deleted, evicted, kept or failed. `reason`: history (before the kept states), evicted, removed (its agent
    is gone), unnamed (by any state: a commit was cut off), dead-writer, empty, unused (hence an eviction), in-use,
    foreign, or the message of a failure. `held_by`: the refs that keep a part of an evicted agent, or what uses it.
    """

    action: str
    reason: str
    kind: str  # manifest, page, tail, block, snapshot, staging, domain, agent, file
    name: str  # a SHA-256, an id, an agent's name, or a path in the store
    agents: tuple[str, ...]
    held_by: tuple[str, ...]
    bytes: int


class Owners:
    """The agents that garbage was of, as far as manifests that are garbage themselves still tell."""

    def __init__(self, reader: Reader, seen: Survey, evicted: Container[str]) -> None:
        self._reader = reader
        self._evicted = evicted
        self._names: Mapping[str, str] = {root.agent_id: root.agent for root in seen.roots}
        self._agents: dict[tuple[str, StoredObject], set[str]] = defaultdict(set)  # → ids
        for domain_id, objects in seen.doomed.items():
            self._find(domain_id, objects)

    def of(self, domain_id: str, found: StoredObject) -> tuple[str, tuple[str, ...]]:
        """Why it is garbage, and the names of the agents that it was of and that still exist."""
        ids = self._agents.get((domain_id, found), set())
        names = tuple(sorted(self._names[agent_id] for agent_id in ids & self._names.keys()))
        if not ids:
            return "unnamed", names
        if not names:
            return "removed", names
        return "evicted" if any(agent_id in self._evicted for agent_id in ids) else "history", names

    def _find(self, domain_id: str, doomed: Mapping[StoredObject, int]) -> None:
        for own in [found for found in doomed if found.kind == "manifests"]:
            with suppress(AmemError):  # what cannot be read tells nothing
                manifest = self._reader.manifest(domain_id, own.sha256)
                for found in (own, *(named for named, _ in direct(manifest) if named in doomed)):
                    self._agents[domain_id, found].add(manifest.agent)
        for page in [found for found in doomed if found.kind == "pages"]:
            with suppress(AmemError):
                for row in self._reader.page_blocks(domain_id, page.sha256):
                    block = StoredObject("blocks", row.sha256)
                    if block in doomed:
                        self._agents[domain_id, block] |= self._agents.get((domain_id, page), set())


def tell(layout: StoreLayout, seen: Survey, owners: Owners, sweep: Sweep | None) -> Iterator[Handled]:
    """What became of the garbage that a survey found, or (no sweep) what would."""
    failed = sweep.failed if sweep else {}
    for domain_id, objects in seen.doomed.items():
        for found, size in objects.items():
            reason, agents = owners.of(domain_id, found)
            failure = failed.get(found.path(layout, domain_id))
            kind = found.kind.removesuffix("s")
            yield Handled("failed" if failure else "deleted", failure or reason, kind, found.sha256, agents, (), size)
    for domain_id, found in sorted(sweep.pinned if sweep else ()):
        size = size_of(layout, domain_id, found)
        yield Handled("kept", "in-use", found.kind.removesuffix("s"), found.sha256, (), (RUNNING,), size)
    for path, size in (sweep.removed if sweep else seen.removable(layout)).items():
        kind, reason = "snapshot", "removed"
        if path.parent == layout.staging:
            kind, reason = "staging", "dead-writer"
        elif path.parent == layout.domains:
            kind, reason = "domain", "empty"
        yield Handled("deleted", reason, kind, path.name, (), (), size)
    for path in failed:
        if path.suffix not in (".json", ".safetensors"):  # a folder; objects have been told
            yield Handled("failed", failed[path], "file", str(path.relative_to(layout.root)), (), (), 0)


def tell_strangers(layout: StoreLayout, seen: Survey) -> Iterator[Handled]:
    """What is no part of a store, and never deleted."""
    for path in sorted(seen.foreign):
        yield Handled("kept", "foreign", "file", str(path.relative_to(layout.root)), (), (), 0)


def tell_eviction(seen: Survey, root: Root) -> Handled:
    """An agent that was evicted: the bytes that only it held, and who holds the rest."""
    held_by = tuple(sorted(map(str, seen.held_by[root])))
    return Handled("evicted", "unused", "agent", root.agent, (root.agent,), held_by, seen.owned[root])
