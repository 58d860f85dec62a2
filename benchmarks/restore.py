"""How fast an agent's blocks get from disk into attention's arrays, over plain `preadv` of the same bytes.

The blocks have the shapes of Gemma 3 12B and Llama 3.1 8B and random content; agents of 8,192 tokens are stored until
there are `--gb` of them. What is compared, agent by agent: `cache_files.load_blocks` into new memory and into memory of
the pool, with every check that it makes (xxh3 of the whole file, header, token ids), against `preadv` of whole files
into new memory: a NumPy array, on one thread and on as many as `load_blocks` uses, and an anonymous mapping. NumPy
asks Linux for huge pages, which are several times as fast to get as the mapping's small ones.
"""

import mmap
import os
import statistics
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from amem_cli.engine.cache.agent_cache import AgentCache
from amem_cli.engine.cache.slabs import SlabPool
from amem_cli.engine.persist import cache_files
from benchmarks.models import drop_from_page_cache, new_store
from benchmarks.report import Row, bars, finish, interleaved, options, ratio, seconds
from kvstore.commit.state import NewState, Tokens, write_state
from kvstore.format.codecs import CODECS, DEFAULT_CODEC
from kvstore.format.kinds import BLOCK
from kvstore.format.layers import LayerGroup
from kvstore.format.manifest import BlockRow, ModelIdentity
from kvstore.format.records import Domain
from kvstore.naming import new_id
from kvstore.store import Store

TOKENS = 8192  # of one agent
CODEC = CODECS[DEFAULT_CODEC]
IDENTITY = ModelIdentity("random", "0" * 64, {})
FULL = tuple(range(5, 48, 6))
MODELS = {
    "Gemma 3 12B": (
        LayerGroup("full-0", "full", FULL, 8, 256, 256),
        LayerGroup("window-1", "window", tuple(n for n in range(48) if n not in FULL), 8, 256, 256, window=1024),
    ),
    "Llama 3.1 8B": (LayerGroup("full-0", "full", tuple(range(32)), 8, 128, 128),),
}


@dataclass(frozen=True)
class Agent:
    """An agent on disk, and how it is brought back: by `load_blocks`, or by reading its files into plain memory."""

    store: Store
    groups: tuple[LayerGroup, ...]
    domain: str
    tokens: Tokens
    blocks: list[BlockRow]

    @property
    def bytes(self) -> int:
        return sum(row.bytes for row in self.blocks)

    @property
    def paths(self) -> list[Path]:
        return [self.store.layout.object(self.domain, BLOCK, row.sha256) for row in self.blocks]

    def restore(self, pool: Callable[[], SlabPool]) -> AgentCache:
        """Bring the blocks into memory of a pool, or into new memory where that has none."""
        cache = AgentCache(self.groups, CODEC, pool())
        cache_files.load_blocks(
            self.store, self.domain, cache_files.rows_of(self.blocks), cache, self.tokens, TOKENS
        ).now()
        return cache

    def read_plainly(self, memory: memoryview, threads: int) -> None:
        """The files one behind the other, one call for each."""
        ends = accumulate(row.bytes for row in self.blocks)

        def read(path: Path, row: BlockRow, end: int) -> None:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                if os.preadv(descriptor, [memory[end - row.bytes : end]], 0) != row.bytes:
                    raise OSError(f"{path} was not read whole")
            finally:
                os.close(descriptor)

        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(read, self.paths, self.blocks, ends):
                pass

    def read_into_numpy(self, threads: int) -> object:
        memory = np.empty(self.bytes, np.uint8)
        self.read_plainly(memory.data, threads)
        return memory

    def read_into_mapping(self) -> object:
        memory = mmap.mmap(-1, self.bytes)
        self.read_plainly(memoryview(memory), 1)
        return memory


def write_agent(
    store: Store, domain: Domain, groups: tuple[LayerGroup, ...], number: int, cached: int = TOKENS
) -> Agent:
    """Commit an agent of random content, with so many tokens in its cache."""
    random = np.random.default_rng(number)
    tokens = random.integers(0, 1 << 17, cached + 1, np.int32)
    cache = AgentCache(groups, CODEC, SlabPool())
    cache.offset = cached
    for part in cache.with_blocks:
        for block in part.group.needed_blocks(cached):
            for array in part.block(block):
                array[...] = np.frombuffer(random.bytes(array.nbytes), array.dtype).reshape(array.shape)
    with store.hold(f"agent{number}", 0) as hold, store.transaction(domain) as txn:
        state = NewState(new_id(), None, "prefill", IDENTITY, CODEC, groups, tokens, cached)
        manifest, rows = write_state(txn, state, cache_files.CacheContent(cache))
        txn.commit(hold, manifest, None)
    return Agent(store, groups, domain.id, tokens, list(rows.values()))


def measure(model: str, agents: list[Agent], repeats: int, dropped: bool) -> list[Row]:
    """Speeds of a restore, and ratios to plain reading: agent by agent, all ways in turn."""
    pool = SlabPool()
    agents[0].restore(lambda: pool).release()  # makes the pool's memory
    speeds: dict[str, list[float]] = defaultdict(list)
    for agent in agents:
        ways = {
            "new": partial(seconds, partial(agent.restore, SlabPool)),
            "pooled": partial(seconds, partial(agent.restore, lambda: pool), AgentCache.release),
            "one": partial(seconds, partial(agent.read_into_numpy, 1)),
            "many": partial(seconds, partial(agent.read_into_numpy, cache_files.READERS)),
            "mapping": partial(seconds, agent.read_into_mapping),
        }
        for way, times in interleaved(
            repeats, ways, partial(drop_from_page_cache, agent.store) if dropped else None
        ).items():
            speeds[way] += [agent.bytes / elapsed for elapsed in times]
    return [
        {
            "model": model,
            "page cache": "dropped" if dropped else "warm",
            "memory": memory,
            "GB": sum(agent.bytes for agent in agents) / 1e9,
            "GB/s": statistics.median(speeds[memory]) / 1e9,
            "over NumPy": ratio(speeds[memory], speeds["one"]),
            f"over NumPy, {cache_files.READERS} threads": ratio(speeds[memory], speeds["many"]),
            "over a mapping": ratio(speeds[memory], speeds["mapping"]),
        }
        for memory in ("new", "pooled")
    ]


def draw(axes: Any, rows: list[Row]) -> None:
    names = [f"{str(row['model']).split()[0]}\n{row['page cache']}\n{row['memory']}" for row in rows]
    series = {key: [float(row[key] or 0) for row in rows] for key in rows[0] if key.startswith("over")}
    bars(axes, names, series)
    axes.axhline(0.8, color="grey", linestyle=":", linewidth=1)
    axes.set_ylabel("restore throughput, plain preadv = 1")


def main() -> None:
    parser = options("restore", __doc__ or "")
    parser.add_argument("--gb", type=float, default=2.0, help="bytes of blocks for each model, in 10^9")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dir", type=Path, help="a folder on the disk to be read (default: temporary files)")
    args = parser.parse_args()
    rows: list[Row] = []
    for model, groups in MODELS.items():
        with new_store(args.dir) as store:
            domain = store.create_domain()
            agents: list[Agent] = []
            while sum(agent.bytes for agent in agents) < args.gb * 1e9:
                agents.append(write_agent(store, domain, groups, len(agents)))
            rows += measure(model, agents, args.repeats, dropped=False)
            if hasattr(os, "posix_fadvise"):
                rows += measure(model, agents, args.repeats, dropped=True)
    finish("restore", args, rows, draw)


if __name__ == "__main__":
    main()
