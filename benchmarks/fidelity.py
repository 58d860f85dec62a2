"""What a quantized cache costs in quality: KL and perplexity beside a cache in full precision.

The cache is the one that serves, and the reference is mlx-lm's own, fed in the same passes. Two figures for each
codec: the text in passes of 64 tokens, so that nearly all it looks back at is quantized, and token by token after a
prefill of it, as an answer is generated. KL is that of the next token's distribution to the reference's, in nats per
token.
"""

import math
from collections.abc import Callable, Iterator
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

Run = Callable[[list[int]], mx.array]  # token ids of one pass → log probabilities [tokens, vocabulary] in float32


def runs_of(model: LoadedModel) -> dict[str, Run]:
    """The reference, and a run through the cache for each codec. Each starts with an empty cache."""
    spec = describe(model.model)
    own = make_prompt_cache(model.model)

    def reference(ids: list[int]) -> mx.array:
        out = _log_probabilities(model.model(mx.array([ids]), cache=own))
        mx.eval(out, [cache.state for cache in own])
        return out

    def through(name: str) -> Run:
        cache = spec.new_cache(CODECS[name], SlabPool())

        def run(ids: list[int]) -> mx.array:
            out = _log_probabilities(model.model(mx.array([ids]), cache=cache.layers))
            cache.settle(len(ids), out)
            return out

        return run

    return {REFERENCE: reference, **{name: through(name) for name in CODEC_NAMES}}


def _log_probabilities(logits: mx.array) -> mx.array:
    exact = logits[0].astype(mx.float32)
    return exact - mx.logsumexp(exact, axis=-1, keepdims=True)


def _float(array: mx.array) -> float:
    value = array.item()
    assert isinstance(value, float)
    return value


def compare(model: LoadedModel, ids: list[int], unscored: int, lengths: Iterator[int]) -> list[Row]:
    """Feed `ids` but the last: `unscored` tokens as a prefill, and then passes of `lengths`, which are scored."""
    runs = runs_of(model)
    at = 0
    for length in passes(0, unscored, logits=False):
        for run in runs.values():
            run(ids[at : at + length])
        at += length
    divergence, loss = dict.fromkeys(runs, 0.0), dict.fromkeys(runs, 0.0)
    for length in lengths:
        targets = mx.array(ids[at + 1 : at + length + 1])[:, None]
        expected = runs[REFERENCE](ids[at : at + length])
        for name, run in runs.items():
            found = expected if name == REFERENCE else run(ids[at : at + length])
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
        for name in runs
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
