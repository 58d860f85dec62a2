"""What the quantized cache costs in speed: prefill and decode beside mlx-lm's own caches.

Same weights, same BLAS, same passes of 256 tokens, in turn. mlx-lm's QuantizedKVCache has no sliding windows: where a
model has them it is put on those layers all the same, and keeps all tokens there. It is compared in decode only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import nan
from statistics import median
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache

from amem_cli.engine.cache.feeder import Feeder, passes
from amem_cli.engine.cache.probe import describe
from amem_cli.engine.cache.slabs import SlabPool
from amem_cli.engine.models.load import LoadedModel
from benchmarks.models import add_model, add_text, open_model, opening_tokens
from benchmarks.report import Row, bars, finish, interleaved, options, ratio, seconds
from kvstore.format.codecs import CODECS, DEFAULT_CODEC

STEPS = 16  # decode steps in one measurement


@dataclass
class Contender:
    """One way to run a model: `feed` takes token ids through it, and gives the last one's logits where wanted."""

    feed: Callable[[list[int], bool], object]

    def prefill(self, ids: list[int]) -> None:
        at = 0
        for length in passes(0, len(ids), logits=False):
            self.feed(ids[at : at + length], False)
            at += length

    def decode(self, ids: list[int]) -> None:
        for token in ids:
            self.feed([token], True)


def contenders(model: LoadedModel) -> dict[str, Callable[[], Contender]]:
    """Each with a new cache on every call."""
    spec, pool = describe(model.model), SlabPool()

    def amem() -> Contender:
        return Contender(Feeder(model.model, spec.new_cache(CODECS[DEFAULT_CODEC], pool)).feed)

    def mlx_lm(cache: list[Any]) -> Contender:
        def feed(ids: list[int], logits: bool) -> None:
            out = model.model(mx.array([ids]), cache=cache)
            mx.eval([layer.state for layer in cache], *([out[0, -1]] if logits else []))

        return Contender(feed)

    layers = len(make_prompt_cache(model.model))
    return {
        "amem": amem,
        "KVCache": lambda: mlx_lm(make_prompt_cache(model.model)),
        "QuantizedKVCache": lambda: mlx_lm([QuantizedKVCache(64, 4) for _ in range(layers)]),
    }


def measure(model: LoadedModel, ids: list[int], tokens: int, repeats: int) -> list[Row]:
    """Prefill of `tokens` tokens, then decode steps at that length."""
    ways = contenders(model)
    ready: dict[str, Contender] = {}

    def prefill(name: str) -> float:
        ready[name] = ways[name]()
        return seconds(lambda: ready[name].prefill(ids[:tokens]))

    def decode(name: str) -> float:
        return seconds(lambda: ready[name].decode(ids[tokens : tokens + STEPS]))

    prefilled = interleaved(repeats, {name: partial(prefill, name) for name in ("amem", "KVCache")})
    prefill("QuantizedKVCache")
    decoded = interleaved(repeats, {name: partial(decode, name) for name in ways})
    return [
        {
            "what": what,
            "tokens": tokens,
            "amem tokens/s": count / median(found["amem"]),
            **{
                f"over {name}": ratio(found[name], found["amem"]) if name in found else None
                for name in ways
                if name != "amem"
            },
        }
        for what, found, count in (("prefill", prefilled, tokens), ("decode", decoded, STEPS))
    ]


def draw(axes: Any, rows: list[Row]) -> None:
    names = [f"{row['what']}, {row['tokens']:,}" for row in rows]
    bars(axes, names, {key: [float(row[key] or nan) for row in rows] for key in rows[0] if key.startswith("over")})
    axes.axhline(1, color="grey", linestyle=":", linewidth=1)
    axes.set_ylabel("tokens/s of amem, mlx-lm = 1")


def main() -> None:
    parser = options("prefill", __doc__ or "")
    add_model(parser)
    add_text(parser)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    model = open_model(args.model)
    ids = opening_tokens(model, args.text, max(args.tokens) + STEPS * args.repeats)
    finish("prefill", args, [row for n in args.tokens for row in measure(model, ids, n, args.repeats)], draw)


if __name__ == "__main__":
    main()
