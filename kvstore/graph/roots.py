"""TODO."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvstore.commit import refs
from kvstore.commit.journal import VOID, read_journal
from kvstore.errors import AmemError, DamageError
from kvstore.format.layout import StoreLayout

ENDS = (refs.REMOVE, refs.ERASE, VOID)  # of lines after which an agent may have gone


@dataclass(frozen=True)
class Root:
    """A ref: where marking begins. An agent's has no `snapshot`, a snapshot's was never `updated`."""

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
    """The ref at `path`, None where there is none any more. Raises DamageError."""
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
        raise DamageError(f"{path} is altered: it holds another name", "run `amem verify` to see what it hurts")
    return root


def find_orphans(layout: StoreLayout, roots: Iterable[Root]) -> set[Root]:
    """Snapshots whose agent has gone, as the journal says: left by a removal or an import that was cut off.

    One whose agent is merely not there is damaged, or lacks it: it is none of them.
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
    """Whether the agent of a ref is there, now. Raises DamageError."""
    agent = refs.read_agent(layout, root.agent)
    return agent is not None and agent.id == root.agent_id


def _readable_roots(layout: StoreLayout) -> Iterator[Root]:
    for path in ref_paths(layout):
        with suppress(AmemError):
            root = read_root(layout, path)
            if root:
                yield root
