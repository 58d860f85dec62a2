"""What a handle for latents is worth: attention of one decode step on their codes, beside dequantized arrays.

Layers have the latents of DeepSeek V2 and V3 (512 numbers and a rotated part of 64), random content, and no weights.
A step goes through the seam as a model's does: the rotated parts' scores as a mask, then attention over the latents.
Memory is what the step allocates at its largest.
"""

from functools import partial
from statistics import median
from typing import Any

import mlx.core as mx
from mlx_lm.models import base

from amem_cli.engine.cache import attention
from amem_cli.engine.cache.agent_cache import AgentCache
from amem_cli.engine.cache.slabs import SlabPool
from benchmarks.report import Row, bars, finish, interleaved, options, ratio, seconds
from kvstore.format.codecs import CODECS, DEFAULT_CODEC
from kvstore.format.layers import LayerGroup
from kvstore.format.parts import BLOCK_TOKENS

GROUP = LayerGroup("full-0", "full", (0, 1, 2, 3), kv_heads=1, key_dim=512, value_dim=64, latent=True)
SCALE = 192**-0.5  # a query's two parts have 128 + 64 numbers before the first is mapped to the latents


def filled(tokens: int, *, by_handle: bool) -> AgentCache:
    """A cache of so many tokens, equal content each time."""
    mx.random.seed(0)
    arrays_only = frozenset[int]() if by_handle else frozenset(GROUP.layers)
    cache = AgentCache([GROUP], CODECS[DEFAULT_CODEC], SlabPool(), arrays_only)
    for at in range(0, tokens, BLOCK_TOKENS):
        length = min(BLOCK_TOKENS, tokens - at)
        for layer in cache.layers:
            layer.update_and_fetch(*(mx.random.normal((1, 1, length, dim)) for dim in (GROUP.key_dim, GROUP.value_dim)))
        cache.settle(length)
    return cache


def step(cache: AgentCache, queries: mx.array, rotated: mx.array) -> mx.array:
    """One query, [1, heads, 1, 512] and [1, heads, 1, 64], through all layers, each fed what the last one gave."""
    for layer in cache.layers:
        latents, parts = layer.update_and_fetch(queries[:, :1], rotated[:, :1])
        bias = (rotated * SCALE) @ parts.swapaxes(-1, -2)
        queries = base.scaled_dot_product_attention(queries, latents, latents, cache=None, scale=SCALE, mask=bias)
    mx.eval(queries)
    cache.forget()
    return queries


def measure(caches: dict[str, AgentCache], heads: int, repeats: int) -> Row:
    """Time and memory of a step for so many query heads, either way."""
    queries, rotated = (mx.random.normal((1, heads, 1, dim)) for dim in (GROUP.key_dim, GROUP.value_dim))
    mx.eval(queries, rotated)
    first, second = (step(cache, queries, rotated) for cache in caches.values())
    if not mx.allclose(first, second, atol=1e-2):
        raise ValueError("the two ways do not say the same")
    peaks: dict[str, int] = {}

    def run(name: str) -> float:
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        elapsed = seconds(lambda: step(caches[name], queries, rotated))
        peaks[name] = mx.get_peak_memory() - before
        return elapsed

    found = interleaved(repeats, {name: partial(run, name) for name in caches})
    return {
        "heads": heads,
        "tokens": caches["handle"].offset,
        "handle ms": median(found["handle"]) * 1e3,
        "arrays ms": median(found["arrays"]) * 1e3,
        "handle / arrays": ratio(found["handle"], found["arrays"]),
        "handle MB": peaks["handle"] / 1e6,
        "arrays MB": peaks["arrays"] / 1e6,
    }


def draw(axes: Any, rows: list[Row]) -> None:
    names = [f"{row['heads']} heads" for row in rows]
    memory = [float(row["handle MB"] or 0) / float(row["arrays MB"] or 1) for row in rows]
    bars(axes, names, {"time": [float(row["handle / arrays"] or 0) for row in rows], "memory": memory})
    axes.axhline(1, color="grey", linestyle=":", linewidth=1)
    axes.set_ylabel("handle, arrays = 1")


def main() -> None:
    parser = options("latents", __doc__ or "")
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 64, 128])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    attention.install()
    caches = {name: filled(args.tokens, by_handle=name == "handle") for name in ("handle", "arrays")}
    finish("latents", args, [measure(caches, heads, args.repeats) for heads in args.heads], draw)


if __name__ == "__main__":
    main()
