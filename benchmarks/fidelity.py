"""What a quantized cache costs in quality: KL and perplexity beside a cache in full precision.

The cache is the one that serves, and it goes through disk: what an agent has read is committed, dropped from memory and
resumed from its files, and then it is scored on what follows. The reference is mlx-lm's own cache, fed in the same
passes. KL is that of the next token's distribution to the reference's, in nats per token. There are three ways:

- Windows of 512 tokens at a stride of 256, as in the paper (arXiv 2603.04428): the first half is prefilled and goes
  through disk, the second is scored. Each window begins as a prompt does, with BOS where the model has one, since Gemma
  makes no sense of a text without.
- A long text in passes of 64 tokens, through disk at each block's end, all of it scored.
- A long context, prefilled and through disk, and then decoded token by token, as an answer is generated.

Passes of 64 stand in for decode, which takes several times as long: they end where groups do, so each token looks back
at what it would in decode, the groups before its own quantized, and its own group as it is.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from amem_cli.engine.cache.feeder import passes
from amem_cli.engine.models.load import LoadedModel
from amem_cli.engine.models.registry import DEMO
from benchmarks.caches import Cache, Reference, StoredAgent
from benchmarks.models import new_store, open_model, opening_tokens
from benchmarks.report import Row, finish, options
from kvstore.format.codecs import CODECS
from kvstore.format.parts import BLOCK_TOKENS, GROUP_TOKENS

REFERENCE = "full precision"
BASELINE = "q4-token"
WINDOW, STRIDE = 512, 256


@dataclass
class Score:
    """Sums over the tokens that were scored."""

    tokens: int = 0
    loss: float = 0.0  # nats
    divergence: float = 0.0  # nats
    nbytes: int = 0  # of the files that the agent was last restored from

    def add(self, other: "Score") -> None:
        self.tokens += other.tokens
        self.loss += other.loss
        self.divergence += other.divergence
        self.nbytes = other.nbytes

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss / self.tokens)

    @property
    def kl(self) -> float:
        return self.divergence / self.tokens


@dataclass(frozen=True)
class Way:
    """Texts, each of which is prefilled to `context`, and from there on scored in passes of `step` tokens."""

    name: str
    texts: Sequence[Sequence[int]]  # with one token more than is fed: the last one is only foretold
    context: int
    step: int


def ways(model: LoadedModel, text: Path | None, lengths: Sequence[int], windows: int, decoded: int) -> Iterator[Way]:
    """The windows, and for each of `lengths` the two long ways."""
    ids = opening_tokens(model, text, max((windows + 1) * STRIDE, *lengths) + decoded + 1)
    opening = model.prompt.opening()
    starts = range(len(opening), len(opening) + windows * STRIDE, STRIDE)
    views = [[*opening, *ids[start : start + WINDOW + 1 - len(opening)]] for start in starts]
    yield Way(f"windows of {WINDOW}", views, WINDOW - STRIDE, GROUP_TOKENS)
    for length in lengths:
        yield Way(f"{length:,} in passes of {GROUP_TOKENS}", [ids[: length + 1]], 0, GROUP_TOKENS)
        yield Way(f"decode after {length:,}", [ids[: length + decoded + 1]], length, 1)


def compare(model: LoadedModel, codecs: Sequence[str], ids: Sequence[int], context: int, step: int) -> dict[str, Score]:
    """Feed all of `ids` but the last to the reference and to an agent of each codec: a prefill of `context` tokens, and
    then passes of `step`, which are scored. Agents go through disk behind the prefill and at each block's end.
    """
    with new_store() as store:
        caches: dict[str, Cache] = {name: StoredAgent(store, model, name, ids) for name in codecs}
        caches = {REFERENCE: Reference(model), **caches}
        scores = {name: Score() for name in caches}
        at = 0
        for length in passes(0, context, logits=False):
            for cache in caches.values():
                cache.feed(ids[at : at + length])
            at += length
        for start in range(context, len(ids) - 1, step):
            if start and (start == context or start % BLOCK_TOKENS == 0):
                for cache in caches.values():
                    cache.through_disk()
            _score(caches, scores, ids[start : min(start + step + 1, len(ids))])
    return scores


def _score(caches: dict[str, Cache], scores: dict[str, Score], ids: Sequence[int]) -> None:
    """One pass of all of `ids` but the last for each cache, the reference first."""
    targets = mx.array(list(ids[1:]))[:, None]
    expected = caches[REFERENCE].score(ids[:-1])
    weights = mx.exp(expected)  # [tokens, vocabulary]
    mx.eval(weights)
    for name, cache in caches.items():
        found = expected if name == REFERENCE else cache.score(ids[:-1])
        loss = -_float(mx.sum(mx.take_along_axis(found, targets, axis=-1)))
        divergence = _float(mx.sum(weights * (expected - found)))
        scores[name].add(Score(len(ids) - 1, loss, divergence, cache.nbytes))


def _float(array: mx.array) -> float:
    value = array.item()
    assert isinstance(value, float)
    return value


def measure(model: LoadedModel, codecs: Sequence[str], way: Way) -> list[Row]:
    """A row for full precision and one for each codec."""
    total = {name: Score() for name in (REFERENCE, *codecs)}
    for ids in way.texts:
        for name, score in compare(model, codecs, ids, way.context, way.step).items():
            total[name].add(score)
    reference, baseline = total[REFERENCE], total.get(BASELINE)
    return [
        {
            "way": way.name,
            "codec": name,
            "tokens": score.tokens,
            "perplexity": score.perplexity,
            f"over {REFERENCE}": score.perplexity / reference.perplexity,
            "KL": score.kl,
            f"over {BASELINE}": score.kl / baseline.kl if baseline else None,
            "bytes": score.nbytes or None,
        }
        for name, score in total.items()
    ]


def draw(axes: Any, rows: list[Row]) -> None:
    shown = [row for row in rows if row["codec"] != REFERENCE]
    places = list(dict.fromkeys(f"{row['model']}\n{row['way']}" for row in shown))
    codecs = list(dict.fromkeys(str(row["codec"]) for row in shown))
    for codec in codecs:
        found = [float(row["KL"] or 0) for row in shown if row["codec"] == codec]
        axes.plot(found, range(len(places)), "o", label=codec)
    axes.set_yticks(range(len(places)), places, fontsize=8)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.set(xscale="log", xlabel="KL to full precision, nats per token")
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=len(codecs), fontsize=8)


def main() -> None:
    parser = options("fidelity", __doc__ or "")
    parser.add_argument("text", type=Path, nargs="?", metavar="TEXT", help="a text file (default: the demo's text)")
    parser.add_argument("--model", nargs="+", default=[DEMO], help=f"model folders, .gguf files or {DEMO}")
    parser.add_argument("--codec", nargs="+", choices=CODECS, default=list(CODECS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048], help="lengths of the long ways")
    parser.add_argument("--windows", type=int, default=7, help=f"how many windows of {WINDOW} tokens")
    parser.add_argument("--decode", type=int, default=128, help="tokens to decode after a long context")
    args = parser.parse_args()
    rows: list[Row] = []
    for name in args.model:
        model = open_model(name)
        for way in ways(model, args.text, args.tokens, args.windows, args.decode):
            rows += ({"model": Path(name).name, **row} for row in measure(model, args.codec, way))
    finish("fidelity", args, rows, draw)


if __name__ == "__main__":
    main()
