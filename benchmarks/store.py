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
import numpy.typing as npt

from benchmarks.report import Row, finish, options
from kvstore.commit.index import Index
from kvstore.commit.journal import NO_LINE, Actor, Change, Entry
from kvstore.disk.clock import timestamp
from kvstore.format import document
from kvstore.format.block import BlockHeader, digest, encode_header
from kvstore.format.codecs import CODECS
from kvstore.format.kinds import BLOCK, MANIFEST, PAGE
from kvstore.format.layers import LayerGroup, block_parts
from kvstore.format.manifest import PAGE_TOKENS, BlockRow, FileRow, Manifest, ModelIdentity, Page, Turn, encode
from kvstore.format.parts import BLOCK_TOKENS
from kvstore.format.prefix_keys import prefix_chain
from kvstore.format.records import AgentRef, Domain
from kvstore.naming import new_id
from kvstore.store import Store

Tokens = npt.NDArray[np.int32]

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
        rows = self._blocks(domain, tokens)
        Index(layout).add(domain.id, rows)
        agent_id, created = new_id(), ""
        head: str | None = None
        entry: Entry | None = None
        for state in range(1, STATES_PER_AGENT + 1):
            end = state * BLOCKS_PER_STATE * BLOCK_TOKENS
            before, head = (
                head,
                self._state(domain, agent_id, head, tokens[: end + 1], rows[: state * BLOCKS_PER_STATE]),
            )
            entry = self._line(Change("extend", agent_id, domain.id, before, head))
            created = created or entry.time
        assert head and entry
        name = f"agent-{self.agents}"
        _write(layout.agent_ref(name), document.encode(AgentRef(name, agent_id, domain.id, head, created, entry.time)))
        self.agents += 1

    def _blocks(self, domain: Domain, tokens: Tokens) -> list[BlockRow]:
        rows, parent = [], ""
        for place, key in enumerate(prefix_chain(domain.salt, _MODEL.fingerprint, _CODEC.name, _GROUP.id, tokens)):
            start = place * BLOCK_TOKENS
            header = BlockHeader(domain.id, _MODEL.fingerprint, _CODEC.name, _GROUP.id, start, key, parent)
            parts = block_parts(_GROUP, _CODEC, start)
            data = encode_header(header.metadata(), parts) + tokens[start : start + BLOCK_TOKENS].tobytes()
            found = digest([data])
            _write(self.store.layout.object(domain.id, BLOCK, found.sha256), data, 0o400)
            rows.append(BlockRow(_GROUP.id, start, key, found.sha256, found.xxh3, found.bytes))
            parent = key
        return rows

    def _state(
        self,
        domain: Domain,
        agent_id: str,
        previous: str | None,
        tokens: Tokens,
        rows: list[BlockRow],
    ) -> str:
        layout, ids, pages = self.store.layout, tokens.tolist(), []
        for start in range(0, len(ids), PAGE_TOKENS):
            own = tuple(row for row in rows if start <= row.position < start + PAGE_TOKENS)
            data = encode(Page(start, tuple(ids[start : start + PAGE_TOKENS]), own, domain.salt))
            found = digest([data])
            _write(layout.object(domain.id, PAGE, found.sha256), data)
            pages.append(FileRow(found.sha256, found.xxh3, found.bytes, len(ids[start : start + PAGE_TOKENS])))
        manifest = Manifest(
            agent=agent_id,
            domain=domain.id,
            salt=domain.salt,
            previous=previous,
            resumes=None,
            op="extend",
            model=_MODEL,
            codec=_CODEC,
            groups=(_GROUP,),
            tokens=len(ids),
            cached=len(ids) - 1,
            pages=tuple(pages),
            window_blocks=(),
            tail=None,
            feeds=((BLOCK_TOKENS, len(rows)),),
            turns=(Turn("user", 0, len(ids)),),
            owed=(),
            stop=None,
            sampling=None,
            complete=True,
            created=timestamp(),
        )
        data = encode(manifest)
        found = digest([data])
        _write(layout.object(domain.id, MANIFEST, found.sha256), data)
        return found.sha256

    def _line(self, change: Change) -> Entry:
        self._seq += 1
        entry = Entry.of(self._seq, self._prev, change, _ACTOR)
        with self.store.layout.journal.open("ab") as journal:
            journal.write(entry.line())
        self.store.layout.journal.chmod(0o600)
        self._prev = entry.digest
        return entry


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
