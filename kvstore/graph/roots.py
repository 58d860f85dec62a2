"""The one list of roots: the refs of agents and snapshots, from which everything that must stay is reachable."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from kvstore.commit import refs
from kvstore.commit.journal import VOID, read_journal
from kvstore.errors import AmemError, DamageError
from kvstore.format.layout import StoreLayout
from kvstore.format.records import AgentRef
from kvstore.reader import Reader

ENDS = (refs.REMOVE, refs.ERASE, VOID)  # of lines after which an agent may have gone


class Root(Struct, frozen=True):
    """A ref. An agent's has no `snapshot`, a snapshot's has no `updated`."""

    path: Path
    agent: str
    agent_id: str
    domain: str
    manifest: str
    snapshot: str | None
    updated: str | None
    created: str
    note: str | None = None

    def __str__(self) -> str:
        return f"{self.agent}@{self.snapshot}" if self.snapshot else self.agent


def ref_paths(layout: StoreLayout) -> list[Path]:
    """The files of all refs: agents, then snapshots."""
    folders = [path for path in _children(layout.snapshot_refs) if path.is_dir() and not path.is_symlink()]
    return [*_children(layout.agent_refs), *(path for folder in folders for path in _children(folder))]


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except FileNotFoundError:
        return []


def read_root(layout: StoreLayout, path: Path) -> Root | None:
    """The ref at `path`; None where it no longer exists. Raises DamageError."""
    if path.parent == layout.agent_refs:
        agent = refs.read_agent(layout, path.name)
        if agent is None:
            return None
        root = Root(path, agent.name, agent.id, agent.domain, agent.manifest, None, agent.updated, agent.created)
    else:
        made = refs.read_snapshot(layout, path.parent.name, path.name)
        if made is None:
            return None
        ids = (made.agent_id, made.domain, made.manifest)
        root = Root(path, made.agent, *ids, made.name, None, made.created, made.note)
    if path not in (layout.agent_ref(root.agent), layout.snapshot_ref(root.agent, root.snapshot or "")):
        raise DamageError(f"{path} is altered: it holds another name", "`amem verify` lists the affected agents")
    return root


def find_orphans(layout: StoreLayout, roots: Iterable[Root]) -> set[Root]:
    """Snapshots whose agent was removed according to the journal: a removal or an import was cut off.

    A snapshot whose agent is missing for another reason is damage, not an orphan.
    """
    roots = list(roots)
    agents = {root.agent_id for root in roots if root.snapshot is None}
    alone = {root for root in roots if root.agent_id not in agents}
    gone: set[str] = set()
    if alone:
        with suppress(DamageError):
            gone.update(entry.change.agent_id for entry in read_journal(layout.journal) if entry.change.op in ENDS)
    return {root for root in alone if root.agent_id in gone}


def has_agent(layout: StoreLayout, root: Root) -> bool:
    """Whether the agent of a ref exists now. Raises DamageError."""
    agent = refs.read_agent(layout, root.agent)
    return agent is not None and agent.id == root.agent_id


def readable_roots(layout: StoreLayout) -> Iterator[Root]:
    """All refs; those that cannot be read are skipped."""
    for path in ref_paths(layout):
        with suppress(AmemError):
            root = read_root(layout, path)
            if root:
                yield root


def agent_roots(reader: Reader, agent: AgentRef) -> list[Root]:
    """The roots of one agent: its head, then its snapshots. Raises DamageError."""
    layout = reader.layout
    paths = [layout.agent_ref(agent.name), *_children(layout.snapshot_folder(agent.name))]
    roots = [root for path in paths if (root := read_root(layout, path))]
    return [root for root in roots if root.agent_id == agent.id]
