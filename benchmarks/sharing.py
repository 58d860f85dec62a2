"""What agents of one domain bring by sharing their full slabs in memory: an agent and ten forks of it.

Agents have the shapes of Gemma 3 270M and Qwen2.5 Coder 0.5B, and random content: neither memory nor reading depends
on what is in a cache. Their last token is not in the cache, as behind any prefill, so their last slab is not full.
The budget is that of ten agents without sharing; a fork's reload is measured with nothing else in memory and beside
its parent, in memory that was used before.
"""

from functools import partial
from statistics import median
from typing import Any

from amem_cli.engine.cache.agent_cache import AgentCache, footprint
from amem_cli.engine.cache.slabs import SlabPool
from amem_cli.engine.persist import cache_files
from benchmarks.models import new_store
from benchmarks.report import Row, bars, finish, interleaved, options, ratio, seconds
from benchmarks.restore import CODEC, Agent, write_agent
from kvstore.format.layers import LayerGroup
from kvstore.naming import Ref

FORKS = 10
FULL = (5, 11, 17)
MODELS = {
    "Gemma 3 270M": (
        LayerGroup("full-0", "full", FULL, 1, 256, 256),
        LayerGroup("window-1", "window", tuple(n for n in range(18) if n not in FULL), 1, 256, 256, window=512),
    ),
    "Qwen2.5 Coder 0.5B": (LayerGroup("full-0", "full", tuple(range(24)), 2, 64, 64),),
}


def load(agent: Agent, number: int, pool: SlabPool) -> AgentCache:
    """The agent, or a fork of it: both name the same blocks."""
    cache = AgentCache(agent.groups, CODEC, pool)
    cache_files.load(agent.store, agent.store.resolve(Ref(f"agent{number}")).manifest, cache, agent.tokens).now()
    return cache


def fitting(agent: Agent, number: int, budget: int) -> int:
    """How many agents, forks of each other, a budget holds."""
    pool, agents = SlabPool(), 0
    while pool.nbytes <= budget:
        load(agent, number, pool)
        agents += 1
    return agents - 1


def measure(model: str, agent: Agent, number: int, repeats: int) -> Row:
    tokens = agent.tokens.size
    alone, beside = SlabPool(), SlabPool()
    parent = load(agent, number, beside)
    for pool in (alone, beside):
        load(agent, number, pool).release()  # makes the pool's memory
    reload = {
        name: partial(seconds, partial(load, agent, number, pool), AgentCache.release)
        for name, pool in (("alone", alone), ("beside", beside))
    }
    found = interleaved(repeats, reload)
    parent.release()
    size = footprint(agent.groups, CODEC, tokens)
    family = SlabPool()
    for _ in range(1 + FORKS):
        load(agent, number, family)
    return {
        "model": model,
        "tokens": tokens,
        "an agent, MB": size / 1e6,
        f"{FORKS} forks and it, MB": family.nbytes / 1e6,
        "over no sharing": family.nbytes / ((1 + FORKS) * size),
        "agents in the budget for 10": fitting(agent, number, 10 * size),
        "reload alone, ms": median(found["alone"]) * 1000,
        "reload beside / alone": ratio(found["beside"], found["alone"]),
    }


def draw(axes: Any, rows: list[Row]) -> None:
    names = [f"{row['model']}\n{row['tokens']:,}" for row in rows]
    held = f"{FORKS} forks and it, MB"
    apart = [(1 + FORKS) * float(row["an agent, MB"] or 0) for row in rows]
    bars(axes, names, {"each by itself": apart, "shared": [float(row[held] or 0) for row in rows]})
    axes.set_ylabel(f"an agent and {FORKS} forks, MB")
    axes.tick_params("x", labelsize=7)


def main() -> None:
    parser = options("sharing", __doc__ or "")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384, 32768])
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    rows: list[Row] = []
    for model, groups in MODELS.items():
        with new_store() as store:
            for number, tokens in enumerate(args.tokens):
                agent = write_agent(store, store.create_domain(), groups, number, tokens - 1)
                rows.append(measure(model, agent, number, args.repeats))
    finish("sharing", args, rows, draw)


if __name__ == "__main__":
    main()
