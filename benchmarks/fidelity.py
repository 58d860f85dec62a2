"""What a quantized cache costs in quality: KL and perplexity beside a cache in full precision.

The cache is the one that serves, and the reference is mlx-lm's own, fed in the same passes. Two figures for each
codec: the text in passes of 64 tokens, so that nearly all it looks back at is quantized, and token by token after a
prefill of it, as an answer is generated. KL is that of the next token's distribution to the reference's, in nats per
token.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from amem_cli.engine.generate import passes
from amem_cli.engine.model import LoadedModel
from amem_cli.engine.registry import DEMO
from amem_cli.engine.slab import SlabPool
from amem_cli.engine.spec import describe
from benchmarks.models import open_model, opening_tokens
from benchmarks.report import Row, bars, finish, options
from kvstore.shapes import CODECS, GROUP_TOKENS

CODEC_NAMES = ("q4-channel", "q4-token", "q8-channel")
REFERENCE = "full precision"


@dataclass(frozen=True)
class Way:
    """An empty cache to begin with: what the model is called with, and what evaluates a pass."""

    layers: list[Any]
    settle: Callable[..., None]  # takes how many tokens it had, and what else is to be evaluated

    def feed(self, model: LoadedModel, ids: list[int]) -> None:
        """One pass, whose logits are not computed."""
        model.model(mx.array([ids]), cache=self.layers)
        self.settle(len(ids))

    def score(self, model: LoadedModel, ids: list[int]) -> mx.array:
        """One pass. Returns log probabilities [tokens, vocabulary] in float32."""
        logits: mx.array = model.model(mx.array([ids]), cache=self.layers)[0].astype(mx.float32)
        out = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        self.settle(len(ids), out)
        return out


def ways(model: LoadedModel) -> dict[str, Way]:
    """The reference, and our cache with each codec."""
    spec = describe(model.model)
    own = make_prompt_cache(model.model)
    found = {REFERENCE: Way(own, lambda _, *outputs: mx.eval(*outputs, [cache.state for cache in own]))}
    for name in CODEC_NAMES:
        cache = spec.new_cache(CODECS[name], SlabPool())
        found[name] = Way(cache.layers, cache.settle)
    return found


def _float(array: mx.array) -> float:
    value = array.item()
    assert isinstance(value, float)
    return value


def compare(model: LoadedModel, ids: list[int], unscored: int, lengths: Iterator[int]) -> list[Row]:
    """Feed `ids` but the last: `unscored` tokens as a prefill, and then passes of `lengths`, which are scored."""
    caches = ways(model)
    at = 0
    for length in passes(0, unscored, logits=False):
        for way in caches.values():
            way.feed(model, ids[at : at + length])
        at += length
    divergence, loss = dict.fromkeys(caches, 0.0), dict.fromkeys(caches, 0.0)
    for length in lengths:
        targets = mx.array(ids[at + 1 : at + length + 1])[:, None]
        expected = caches[REFERENCE].score(model, ids[at : at + length])
        for name, way in caches.items():
            found = expected if name == REFERENCE else way.score(model, ids[at : at + length])
            divergence[name] += _float(mx.sum(mx.exp(expected) * (expected - found)))
            loss[name] -= _float(mx.sum(mx.take_along_axis(found, targets, axis=-1)))
        at += length
    scored = at - unscored
    return [
        {
            "codec": name,
            "tokens": scored,
            "perplexity": math.exp(loss[name] / scored),
            "KL": divergence[name] / scored,
        }
        for name in caches
    ]


def measure(name: str, text: Path | None, tokens: int, decoded: int) -> list[Row]:
    """Both figures for one model."""
    model = open_model(name)
    ids = opening_tokens(model, text, tokens + decoded + 1)
    whole = iter([GROUP_TOKENS] * (tokens // GROUP_TOKENS))
    teacher = compare(model, ids, 0, whole)
    decode = compare(model, ids, tokens, iter([1] * decoded))
    short = Path(name).name
    return [
        *({"model": short, "passes": f"{GROUP_TOKENS} tokens", **row} for row in teacher),
        *({"model": short, "passes": "decode", **row} for row in decode),
    ]


def draw(axes: Any, rows: list[Row]) -> None:
    shown = [row for row in rows if row["codec"] != REFERENCE]
    names = list(dict.fromkeys(f"{row['model']}\n{row['passes']}" for row in shown))
    bars(
        axes, names, {codec: [float(row["KL"] or 0) for row in shown if row["codec"] == codec] for codec in CODEC_NAMES}
    )
    axes.set(yscale="log", ylabel="KL to full precision, nats per token")


def main() -> None:
    parser = options("fidelity", __doc__ or "")
    parser.add_argument("text", type=Path, nargs="?", metavar="TEXT", help="a text file (default: the demo's text)")
    parser.add_argument("--model", nargs="+", default=[DEMO], help=f"model folders, .gguf files or {DEMO}")
    parser.add_argument("--tokens", type=int, default=1024, help="a multiple of 64")
    parser.add_argument("--decode", type=int, default=128, help="tokens to decode after a prefill")
    args = parser.parse_args()
    rows = [row for name in args.model for row in measure(name, args.text, args.tokens, args.decode)]
    finish("fidelity", args, rows, draw)


if __name__ == "__main__":
    main()
