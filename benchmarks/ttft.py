"""Time to the first token: cold, warm, and what one decode step takes at that length.

Cold is everything from the text on: tokens, prefill of all of them, the first token; the model is loaded. Warm takes
the committed agent out of the store, in the same process, with nothing of it in memory: manifest, pages, blocks and
tail with all their checks, then the one pending token. "new" memory is allocated for it, "pooled" was used before.
The decode step is that of the agent that is still in memory.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from amem_cli.engine.cache.feeder import passes
from amem_cli.engine.cache.probe import describe
from amem_cli.engine.models.load import LoadedModel
from amem_cli.engine.prompt.transcript import Text, Transcript
from amem_cli.engine.turns.agent_state import AgentState, AgentStates
from amem_cli.engine.turns.generation import sample
from amem_cli.engine.turns.steps import drive
from benchmarks.models import add_model, add_text, drop_from_page_cache, new_store, open_model, opening_text
from benchmarks.report import Row, finish, interleaved, options, ratio, seconds
from kvstore.format.codecs import CODECS, DEFAULT_CODEC
from kvstore.format.manifest import Sampling
from kvstore.naming import Ref
from kvstore.store import Store

GREEDY = Sampling(0, 0.0, 1.0)


def step(agent: AgentState) -> AgentState:
    """Feed what is pending and sample a token, which is then pending."""
    logits = agent.feeder.feed(agent.pending, logits=True)
    assert logits is not None
    agent.transcript.tokens.append(sample(logits, GREEDY, len(agent.transcript.tokens)))
    return agent


def cold(store: Store, conversations: AgentStates, model: LoadedModel, text: str) -> tuple[AgentState, float]:
    """An agent of `text`, committed with its last token pending, and the seconds to its first token.

    The commit is not in the time: a first token does not wait for it.
    """
    domain = store.create_domain()
    started = time.perf_counter()
    transcript = Transcript()
    transcript.open(model.prompt, None)
    transcript.add(model.prompt, Text(text, raw=True))
    with store.transaction(domain) as txn:
        agent = drive(conversations.begin(domain, CODECS[DEFAULT_CODEC], transcript, txn))
        for length in passes(0, len(transcript.tokens) - 1, logits=False):
            agent.feeder.feed(agent.pending[:length])
        prefilled = time.perf_counter() - started
        with store.hold("agent", 0) as hold:
            conversations.commit(agent, hold, txn, "prefill")
    return agent, prefilled + seconds(lambda: step(agent))


def measure(model: LoadedModel, tokens: int, file: Path | None, repeats: int) -> Row:
    """Times at one length."""
    spec = describe(model.model)
    with new_store() as store:
        pooled = AgentStates(store, model, spec)
        agent, cold_seconds = cold(store, pooled, model, opening_text(model, file, tokens))

        def resume(conversations: AgentStates) -> AgentState:
            return step(drive(conversations.resume(store.resolve(Ref("agent")))))

        def dropped() -> float:
            drop_from_page_cache(store)
            return warm_new()

        def warm_new() -> float:
            return seconds(lambda: resume(AgentStates(store, model, spec)))

        runs: dict[str, Callable[[], float]] = {
            "step": lambda: seconds(lambda: step(agent)),
            "new": warm_new,
            "pooled": lambda: seconds(lambda: resume(pooled), AgentState.release),
        }
        if hasattr(os, "posix_fadvise"):
            runs["dropped"] = dropped
        interleaved(1, runs)  # the first of each is not counted
        found = interleaved(repeats, runs)
        committed = store.resolve(Ref("agent")).manifest.tokens
    return {
        "tokens": committed,
        "cold s": cold_seconds,
        "warm ms": median(found["new"]) * 1000,
        "step ms": median(found["step"]) * 1000,
        "warm / step": ratio(found["new"], found["step"]),
        "pooled / step": ratio(found["pooled"], found["step"]),
        "dropped / step": ratio(found["dropped"], found["step"]) if "dropped" in found else None,
        "cold / warm": cold_seconds / median(found["new"]),
    }


def draw(axes: Any, rows: list[Row]) -> None:
    tokens = [row["tokens"] for row in rows]
    for key, scale, label in (("cold s", 1e3, "cold"), ("warm ms", 1, "warm"), ("step ms", 1, "one decode step")):
        axes.plot(tokens, [float(row[key] or 0) * scale for row in rows], marker="o", label=label)
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms to the first token")
    axes.set_xticks(tokens, [f"{row['tokens']:,}" for row in rows])
    axes.minorticks_off()
    axes.legend(frameon=False)


def main() -> None:
    parser = options("ttft", __doc__ or "")
    add_model(parser)
    add_text(parser)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096, 8192], help="lengths, up to 32768")
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    model = open_model(args.model)
    finish("ttft", args, [measure(model, tokens, args.text, args.repeats) for tokens in args.tokens], draw)


if __name__ == "__main__":
    main()
