"""Several agents' turns at once: decode throughput and where a step's time goes, waiting, and hidden reloads.

Decoding together is held against the same agents one at a time, step by step in turn. A step's time is taken apart:
describing it, evaluating it with nothing in the caches (the weights), what evaluating takes longer with the agents'
contexts (attention), and the host's copies. An agent that speaks while another one prefills is measured with the
scheduler's loop, and as it would be if the prefill ran to its end first. Reloads: agents of which the memory budget
holds half take two turns each; what the loop did not wait for is hidden behind decoding.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
from platformdirs import user_cache_path

from amem_cli.engine.cache.agent_cache import footprint
from amem_cli.engine.cache.decode_batch import DecodeBatch, decode_together
from amem_cli.engine.cache.feeder import Feeder, passes
from amem_cli.engine.models.registry import find
from amem_cli.engine.prompt.transcript import Text
from amem_cli.engine.turns.engine import Engine
from amem_cli.engine.turns.requests import Generation, TurnResult, Watcher
from amem_cli.engine.turns.scheduler import Scheduler, Ticket
from amem_cli.engine.turns.steps import Steps
from benchmarks.models import add_model, add_text, new_store, opening_text, opening_tokens
from benchmarks.report import Row, bars, finish, interleaved, options, ratio, seconds
from kvstore.format.codecs import CODECS, DEFAULT_CODEC
from kvstore.naming import Ref
from kvstore.store import Store

TOGETHER = {1: None, 2: 1.8, 4: 2.5}  # agents → how many times the throughput of one at a time is wanted
CODEC = CODECS[DEFAULT_CODEC]
TOKEN = 7  # any will do
HIDDEN = 0.8


def filled(engine: Engine, ids: Sequence[int]) -> Feeder:
    """An agent in memory that has read `ids`."""
    feeder = Feeder(engine.model.model, engine.spec.new_cache(CODEC, engine.agents.pool))
    for length in passes(0, len(ids), logits=False):
        feeder.feed(ids[feeder.cache.offset : feeder.cache.offset + length])
    return feeder


def together(engine: Engine, rows: Sequence[Feeder]) -> None:
    decode_together(engine.model.model, rows, [TOKEN] * len(rows))


def in_turn(_engine: Engine, rows: Sequence[Feeder]) -> None:
    for feeder in rows:
        feeder.feed([TOKEN], logits=True)


def timed(step: Callable[[Engine, Sequence[Feeder]], None], engine: Engine, rows: Sequence[Feeder]) -> float:
    return seconds(lambda: step(engine, rows))


def taken_apart(engine: Engine, rows: Sequence[Feeder]) -> tuple[float, float, float]:
    """Seconds of one step for describing, evaluating and copying: what `decode_together` does."""
    batch = DecodeBatch([feeder.cache for feeder in rows])
    began = time.perf_counter()
    out = engine.model.model(mx.array([[TOKEN]] * len(rows)), cache=batch.layers)
    logits = [out[i, -1].astype(mx.float32) for i in range(len(rows))]
    intakes = [(group, group.gather()) for feeder in rows for group in feeder.cache.with_blocks]
    described = time.perf_counter()
    mx.eval(logits, [array for _, intake in intakes for array in intake.arrays()])
    evaluated = time.perf_counter()
    for group, intake in intakes:
        group.take(intake)
    return described - began, evaluated - described, time.perf_counter() - evaluated


def decoding(engine: Engine, ids: Sequence[int], steps: int) -> list[Row]:
    """Throughput of 1, 2 and 4 agents together, and the parts of a step."""
    agents = [filled(engine, ids) for _ in range(max(TOGETHER))]
    empty = [filled(engine, ids[:1]) for _ in range(max(TOGETHER))]
    rows: list[Row] = []
    for count, target in TOGETHER.items():
        some = agents[:count]
        runs = {"together": partial(timed, together, engine, some), "in turn": partial(timed, in_turn, engine, some)}
        found = interleaved(steps, runs)
        parts = [median(part) for part in zip(*(taken_apart(engine, some) for _ in range(steps)), strict=True)]
        weights = median(taken_apart(engine, empty[:count])[1] for _ in range(steps))
        rows += [
            row(f"{count} together: tokens/s", count / median(found["together"])),
            row(f"{count} together, over one at a time", ratio(found["in turn"], found["together"]), target),
            row(f"{count} together: describing a step, ms", parts[0] * 1000),
            row(f"{count} together: weights, ms", weights * 1000),
            row(f"{count} together: attention over the context, ms", (parts[1] - weights) * 1000),
            row(f"{count} together: copies by the host, ms", parts[2] * 1000),
        ]
    for feeder in (*agents, *empty):
        feeder.cache.release()
    return rows


def chat(engine: Engine, name: str, tokens: int, _ticket: Ticket[TurnResult]) -> Steps[TurnResult]:
    return engine.chat_steps(Ref(name), [Text(" And then?")], Generation(tokens))


def waiting(engine: Engine, text: str, long_text: str) -> list[Row]:
    """Time to first token of an agent that is asked just when another one has begun to prefill."""
    engine.prefill("talker", [Text(text)])
    scheduler = Scheduler(engine)
    asked: list[Ticket[TurnResult]] = []

    def ask(_: object) -> None:
        if not asked:
            asked.append(scheduler.submit("talker", lambda ticket: chat(engine, "talker", 1, ticket)))

    watcher = Watcher(on_progress=ask)
    scheduler.submit("reader", lambda _: engine.prefill_steps("reader", [Text(long_text)], watcher=watcher))
    scheduler.run()
    with_it = (asked[0].future.result().ttft_ms or 0) / 1000
    prefill = seconds(lambda: engine.prefill("again", [Text(long_text)]))
    without = prefill + (engine.chat(Ref("talker"), [Text(" And then?")], Generation(1)).ttft_ms or 0) / 1000
    return [
        row("asked while another prefills: first token, s", with_it),
        row("asked while another prefills, after it: first token, s", without),
        row("waiting without interleaving, over with it", without / with_it),
    ]


def reloading(store: Store, args: Any, text: str, agents: int) -> list[Row]:
    """How much reading and writing the loop did not wait for, with half of the agents in memory."""
    entry, cache = find(store.layout, args.model), user_cache_path("amem")
    first = Engine(store, entry, cache)
    size = max(first.prefill(f"agent{n}", [Text(text)]).tokens for n in range(agents)) + 4 * args.answer
    budget = agents // 2 * footprint(first.spec.groups, CODEC, size)
    engine = Engine(store, entry, cache, memory=budget)
    scheduler = Scheduler(engine)
    for n in [*range(agents), *range(agents)]:
        name = f"agent{n}"
        scheduler.submit(name, lambda ticket, name=name: chat(engine, name, args.answer, ticket))  # type: ignore[misc]
    scheduler.run()
    figures = scheduler.figures
    return [
        row("reloads: reading and writing, s", figures.work_seconds),
        row("reloads: share hidden behind decoding", figures.hidden, HIDDEN),
        row("reloads: agents in a step", figures.decoded / figures.decode_steps),
    ]


def row(figure: str, value: float, target: float | None = None) -> Row:
    return {"figure": figure, "value": value, "target": target}


def draw(axes: Any, rows: list[Row]) -> None:
    shown = {str(row["figure"]): float(row["value"] or 0) for row in rows}
    names = [f"{count} agents" if count > 1 else "1 agent" for count in TOGETHER]
    parts = ("describing a step, ms", "weights, ms", "attention over the context, ms", "copies by the host, ms")
    bars(axes, names, {part: [shown[f"{count} together: {part}"] for count in TOGETHER] for part in parts})
    axes.set_ylabel("a decode step, ms")


def main() -> None:
    parser = options("batch", __doc__ or "")
    add_model(parser)
    add_text(parser)
    parser.add_argument("--tokens", type=int, default=1024, help="each agent's context")
    parser.add_argument("--long", type=int, default=4096, help="tokens of the text that another agent reads")
    parser.add_argument("--answer", type=int, default=64, help="tokens of an answer while others are reloaded")
    parser.add_argument("--steps", type=int, default=60, help="decode steps of each kind")
    parser.add_argument("--agents", type=int, default=8, help="agents of which half are in memory")
    args = parser.parse_args()
    with new_store() as store:
        engine = Engine(store, find(store.layout, args.model), Path(user_cache_path("amem")))
        text = opening_text(engine.model, args.text, args.tokens)
        rows = decoding(engine, opening_tokens(engine.model, args.text, args.tokens), args.steps)
        rows += waiting(engine, text, opening_text(engine.model, args.text, args.long))
        rows += reloading(store, args, text, args.agents)
    finish("batch", args, rows, draw)


if __name__ == "__main__":
    main()
