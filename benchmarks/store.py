"""What a large store costs: commands that look at all of it, in time and memory, at a tenth, a half, and all of it.

Every ten blocks are a state of their own, and every ten states an agent in a domain of its own. Blocks are as small as
they get, since only their number counts here; manifests, pages, refs and the journal are as large as real ones.
"""

import statistics
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import Row, finish, options
from kvstore.commit.index import Index
from kvstore.commit.journal import NO_LINE, Actor, Change, Entry
from kvstore.commit.state import NewState, Rows, Tokens
from kvstore.format import document
from kvstore.format.block import FileDigest, digest, encode_header
from kvstore.format.codecs import CODECS
from kvstore.format.kinds import BLOCK, MANIFEST, PAGE, ObjectKind
from kvstore.format.layers import LayerGroup, block_parts
from kvstore.format.manifest import BlockRow, FileRow, ModelIdentity, Turn, encode
from kvstore.format.parts import BLOCK_TOKENS
from kvstore.format.records import AgentRef, Domain
from kvstore.naming import new_id
from kvstore.store import Store

BLOCKS_PER_STATE = 10
STATES_PER_AGENT = 10
SHARES = (0.1, 0.5, 1.0)
COMMANDS = {
    "inspect": ("inspect",),
    "gc --dry-run": ("gc", "--dry-run"),
    "verify --quick": ("verify", "--quick"),
}
_OPEN = "import sys; from kvstore.store import Store; from pathlib import Path; Store.open(Path(sys.argv[1]), None)"
_MEASURE = """
import resource, subprocess, sys, time
started = time.perf_counter()
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""  # in a small process of its own: a child's peak counts from that of its parent on
_ACTOR = Actor.here("benchmark", "0")
_MODEL = ModelIdentity("tiny", "f" * 64, {"weights": "a" * 64, "config": "b" * 64, "tokenizer": "c" * 64})
_CODEC = CODECS["q4-channel"]
_GROUP = LayerGroup("full-0", "full", (), kv_heads=1, key_dim=64, value_dim=64)  # no layers: token ids only


class Maker:
    """Writes agents into a store, by its own encoders but without flushing."""

    def __init__(self, root: Path) -> None:
        self.store = Store.open_or_create(root, _ACTOR)
        self.agents = 0
        self._seq = 0
        self._prev = NO_LINE
        self._random = np.random.default_rng(1)

    def add_agent(self) -> None:
        """One agent, in a domain of its own."""
        layout = self.store.layout
        domain = self.store.create_domain()
        for folder in layout.domain_folders(domain.id):
            folder.mkdir(mode=0o700, parents=True)
        layout.domain(domain.id).chmod(0o700)
        _write(layout.domain_file(domain.id), document.encode(domain))
        tokens = self._random.integers(0, 250_000, STATES_PER_AGENT * BLOCKS_PER_STATE * BLOCK_TOKENS + 1, np.int32)
        rows = self._put_blocks(domain, _state("", None, tokens))
        Index(layout).add(domain.id, list(rows.values()))
        agent_id, created = new_id(), ""
        head: str | None = None
        entry: Entry | None = None
        for number in range(1, STATES_PER_AGENT + 1):
            cached = number * BLOCKS_PER_STATE * BLOCK_TOKENS
            before, head = head, self._put_state(domain, _state(agent_id, head, tokens[: cached + 1]), rows)
            entry = self._line(Change("extend", agent_id, domain.id, before, head))
            created = created or entry.time
        assert head and entry
        name = f"agent-{self.agents}"
        _write(layout.agent_ref(name), document.encode(AgentRef(name, agent_id, domain.id, head, created, entry.time)))
        self.agents += 1

    def _put_blocks(self, domain: Domain, state: NewState) -> Rows:
        rows: Rows = {}
        keys = state.prefix_keys(domain, _GROUP)
        for group, number in state.needed_blocks(in_pages=True):
            header = state.block_header(domain, group, number, keys)
            ids = state.tokens[header.position : header.position + BLOCK_TOKENS]
            data = encode_header(header.metadata(), block_parts(group, _CODEC, header.position)) + ids.tobytes()
            found = self._put(domain, BLOCK, data)
            rows[group.id, number] = BlockRow(
                group.id, header.position, header.prefix_key, found.sha256, found.xxh3, found.bytes
            )
        return rows

    def _put_state(self, domain: Domain, state: NewState, rows: Rows) -> str:
        pages = []
        for page in state.pages(domain, rows):
            found = self._put(domain, PAGE, encode(page))
            pages.append(FileRow(found.sha256, found.xxh3, found.bytes, len(page.tokens)))
        return self._put(domain, MANIFEST, encode(state.manifest(domain, rows, tuple(pages), None))).sha256

    def _put(self, domain: Domain, kind: ObjectKind, data: bytes) -> FileDigest:
        found = digest([data])
        _write(self.store.layout.object(domain.id, kind, found.sha256), data, kind.mode)
        return found

    def _line(self, change: Change) -> Entry:
        self._seq += 1
        entry = Entry.of(self._seq, self._prev, change, _ACTOR)
        with self.store.layout.journal.open("ab") as journal:
            journal.write(entry.line())
        self.store.layout.journal.chmod(0o600)
        self._prev = entry.digest
        return entry


def _state(agent_id: str, previous: str | None, tokens: Tokens) -> NewState:
    """A state of these tokens, of which all but the last are in its cache."""
    cached = len(tokens) - 1
    feeds, turns = ((BLOCK_TOKENS, cached // BLOCK_TOKENS),), (Turn("user", 0, len(tokens)),)
    return NewState(agent_id, previous, "extend", _MODEL, _CODEC, (_GROUP,), tokens, cached, feeds, turns)


def _write(path: Path, data: bytes, mode: int = 0o600) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.write_bytes(data)
    path.chmod(mode)


def measure(command: list[str]) -> tuple[float, float]:
    """Seconds and peak MB of a process, which must end well."""
    told = subprocess.run([sys.executable, "-S", "-c", _MEASURE, *command], check=True, capture_output=True, text=True)
    seconds, peak = map(float, told.stdout.split())
    return seconds, peak * (1 if sys.platform == "darwin" else 1024) / 1e6


def run(args: Namespace, root: Path) -> list[Row]:
    """Grow a store, and measure each command at each size, `args.repeats` times."""
    rows: list[Row] = []
    maker = Maker(root)
    amem = [sys.executable, "-m", "amem_cli", "--store", str(root), "--json"]
    commands = {name: [*amem, *words] for name, words in COMMANDS.items()}
    commands["open"] = [sys.executable, "-c", _OPEN, str(root)]
    for share in SHARES:
        while maker.agents * BLOCKS_PER_STATE * STATES_PER_AGENT < args.blocks * share:
            maker.add_agent()
        blocks = maker.agents * BLOCKS_PER_STATE * STATES_PER_AGENT
        for name, command in commands.items():
            measured = [measure(command) for _ in range(args.repeats)]
            seconds, megabytes = (statistics.median(figures) for figures in zip(*measured, strict=True))
            row: Row = {"command": name, "blocks": blocks, "manifests": maker.agents * STATES_PER_AGENT}
            rows.append(row | {"seconds": seconds, "peak MB": megabytes})
    return rows


def draw(axes: Any, rows: list[Row]) -> None:
    for name in dict.fromkeys(row["command"] for row in rows):
        own = [row for row in rows if row["command"] == name]
        axes.plot([row["blocks"] for row in own], [row["seconds"] for row in own], marker="o", label=name)
    axes.set_xlabel("blocks in the store")
    axes.set_ylabel("seconds")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)


def main() -> None:
    parser = options("store", __doc__ or "")
    parser.add_argument("--blocks", type=int, default=100_000, metavar="N", help="how many blocks the store grows to")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="runs of each command at each size")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="amem-store-") as folder:
        rows = run(args, Path(folder) / "store")
    finish("store", args, rows, draw)


if __name__ == "__main__":
    main()
