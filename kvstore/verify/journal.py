"""Check the journal: its chain, and that heads and snapshots are what its lines say."""

from collections.abc import Container, Iterable
from copy import deepcopy
from dataclasses import dataclass, field

from kvstore.commit import refs
from kvstore.commit.journal import VOID, Entry, read_journal
from kvstore.errors import AmemError, DamageError
from kvstore.format.layout import StoreLayout
from kvstore.graph.roots import ENDS, Root, read_root, ref_paths
from kvstore.verify.findings import Findings

_ATTEMPTS = 20
_REMOVALS = (refs.REMOVE, refs.ERASE)
_SNAPSHOT_REMOVALS = (refs.REMOVE_SNAPSHOT, refs.ERASE_SNAPSHOT)
_NO_MOVES = (VOID, refs.COLLECT, refs.REMOVE_DOMAIN, refs.ERASE_DOMAIN)


@dataclass
class JournalState:
    """What the journal says of the refs, as of one line."""

    lines: int = 0
    digest: str | None = None  # of the last line
    heads: dict[str, tuple[str | None, str]] = field(default_factory=dict)  # agent id → (manifest, time)
    created: dict[str, str] = field(default_factory=dict)
    snapshots: dict[tuple[str, str], tuple[str | None, str | None]] = field(default_factory=dict)  # → (manifest, note)
    gone: set[str] = field(default_factory=set)  # agents that were removed, or whose first line is void
    imported: set[str] = field(default_factory=set)  # agents that may have brought snapshots without lines of their own
    in_flight: Entry | None = None  # the last line: its ref may not have moved yet
    breaks: list[str] = field(default_factory=list)  # lines that do not follow their agent's line before

    def take(self, entry: Entry) -> None:
        """Let a line take effect."""
        change = entry.change
        if change.op in ENDS:
            self.gone.add(change.agent_id)
        if change.op == refs.SNAPSHOT:
            self.snapshots[change.agent_id, entry.time] = (change.after, change.note)
        elif change.op in _SNAPSHOT_REMOVALS:
            self.snapshots.pop((change.agent_id, change.note or ""), None)
        elif change.op in _REMOVALS:
            self.heads.pop(change.agent_id, None)
            self.created.pop(change.agent_id, None)
            self.snapshots = {key: value for key, value in self.snapshots.items() if key[0] != change.agent_id}
        elif change.op not in _NO_MOVES:
            if self.heads.get(change.agent_id, (None, ""))[0] != change.before:
                self.breaks.append(f"line {entry.seq} of the journal does not follow its agent's line before")
            self.heads[change.agent_id] = (change.after, entry.time)
            if change.op == "import":
                self.imported.add(change.agent_id)
            self.created.setdefault(change.agent_id, entry.time)


def check_journal(layout: StoreLayout, expected: str | None, findings: Findings) -> JournalState:
    """Check the chain, and compare the refs with it. `expected` begins the digest of a line that must be in it.

    Refs may move meanwhile. They are read before and after the journal; those that are equal must be as it says.
    """
    for _ in range(_ATTEMPTS):
        before = _roots(layout)
        state, has_expected, error = _read(layout, expected)
        after = _roots(layout)
        if before == after or error:
            break
    if error:
        agents = {root.agent for root in after.values()}
        findings.add("damage", "journal", layout.journal.name, error.message, agents)
        return state
    if expected and not has_expected:
        text = f"no line of the journal has the digest sha256:{expected}: it was cut off or written anew"
        findings.add("damage", "journal", layout.journal.name, text)
    for text in state.breaks:
        findings.add("damage", "journal", layout.journal.name, text)
    _check_refs([root for key, root in after.items() if before.get(key) == root], state, findings)
    known = {root.agent_id for root in [*after.values(), *before.values()]}
    for agent_id in sorted(_without_ref(layout, state, known)):
        text = f"agent {agent_id} is in the journal, was not removed and has no ref"
        findings.add("damage", "journal", agent_id, text)
    return state


def _without_ref(layout: StoreLayout, state: JournalState, known: Container[str]) -> set[str]:
    """The ids of agents in the journal that have no ref. An agent may have been removed since: look again."""
    gone = {agent_id for agent_id in state.heads if agent_id not in known}
    if gone:
        again, _, _ = _read(layout, None)
        unfinished = {entry.change.agent_id for entry in (state.in_flight, again.in_flight) if entry}
        gone = (gone & again.heads.keys()) - unfinished
    return gone


def _roots(layout: StoreLayout) -> dict[str, Root]:
    """The refs that can be read; faults of the others are reported elsewhere."""
    found = {}
    for path in ref_paths(layout):
        try:
            root = read_root(layout, path)
        except AmemError:
            continue
        if root:
            found[str(path)] = root
    return found


def _read(layout: StoreLayout, expected: str | None) -> tuple[JournalState, bool, DamageError | None]:
    state, has_expected = JournalState(), False
    try:
        for entry in read_journal(layout.journal):
            if state.in_flight and entry.change.op != VOID:
                state.take(state.in_flight)
            state.in_flight = entry
            state.lines, state.digest = entry.seq, entry.digest
            has_expected |= bool(expected) and entry.digest.startswith(expected or "")
    except DamageError as error:
        return state, has_expected, error
    return state, has_expected, None


def _check_refs(roots: Iterable[Root], state: JournalState, findings: Findings) -> None:
    last = deepcopy(state)
    if state.in_flight:
        last.take(state.in_flight)
    for root in roots:
        if not (_agrees(root, state) or _agrees(root, last)):
            text = f"{root} is not what the journal says"
            findings.add("damage", "journal", str(root), text, [root.agent])


def _agrees(root: Root, state: JournalState) -> bool:
    if root.snapshot is not None:
        if root.agent_id not in state.heads and root.agent_id in state.gone:
            return True  # a removal or an import that was cut off left it
        line = state.snapshots.get((root.agent_id, root.created))
        if line is None and root.agent_id in state.imported:
            return root.created < state.created.get(root.agent_id, "")
        return line == (root.manifest, root.note)
    is_head = state.heads.get(root.agent_id) == (root.manifest, root.updated)
    return is_head and state.created.get(root.agent_id) == root.created
