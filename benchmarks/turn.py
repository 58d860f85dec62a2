"""What a turn, a fork, a snapshot and a restore write, at several context lengths.

Agents end at a block's end. A turn adds 64 tokens and commits; four of them in a row fill a block. Its bytes
(blocks, tail, page, manifest) are held against the least that it could write: the blocks that it fills, and the tail,
quantized. Sizes on disk are of the whole store, index and journal included, in whole blocks of the file system.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from amem_cli.engine.cache.feeder import passes
from amem_cli.engine.cache.probe import describe
from amem_cli.engine.models.load import LoadedModel
from amem_cli.engine.prompt.transcript import Transcript
from amem_cli.engine.turns.agent_state import AgentState, AgentStates
from amem_cli.engine.turns.steps import drive
from benchmarks.models import add_model, add_text, disk_bytes, new_store, open_model, opening_tokens, owed_bytes
from benchmarks.report import Row, bars, finish, options, seconds
from kvstore import lifecycle
from kvstore.commit.transaction import Transaction
from kvstore.disk import files
from kvstore.format.codecs import CODECS, DEFAULT_CODEC
from kvstore.format.layers import bytes_per_token
from kvstore.naming import Ref
from kvstore.store import Store

NEW = 64  # tokens of a turn
TURNS = 4
FORKS = 10
CODEC = CODECS[DEFAULT_CODEC]
OVER_LEAST, OVER_NEW = "turn: bytes over the least", "turn: bytes over the new tokens, Q4"


class Bench:
    """One agent in a store of its own."""

    def __init__(self, store: Store, model: LoadedModel, ids: list[int]) -> None:
        self.store = store
        self.spec = describe(model.model)
        self.conversations = AgentStates(store, model, self.spec)
        domain = store.create_domain()
        with store.transaction(domain) as txn:
            self.agent = drive(self.conversations.begin(domain, CODEC, Transcript(ids), txn))
            self._feed_and_commit(self.agent, "agent", txn)

    def turn(self, agent: AgentState, name: str, ids: list[int]) -> tuple[int, int]:
        """Add `ids` and commit. Returns the bytes written, and the least that could have been."""
        before = agent.cached
        agent.transcript.tokens.extend(ids)
        with self.store.transaction(agent.domain) as txn:
            self._feed_and_commit(agent, name, txn)
            return txn.bytes_written, owed_bytes(self.spec.groups, CODEC, before, agent.cached)

    def _feed_and_commit(self, agent: AgentState, name: str, txn: Transaction) -> None:
        for length in passes(agent.cached, len(agent.pending) - 1, logits=False):
            agent.feeder.feed(agent.pending[:length])
        with self.store.hold(name, 0) as hold:
            self.conversations.commit(agent, hold, txn, "extend")

    def fork_and_extend(self, number: int, ids: list[int]) -> None:
        """A fork, and a turn of its own."""
        name = f"fork{number}"
        lifecycle.fork(self.store, Ref("agent"), name)
        agent = drive(self.conversations.resume(self.store.resolve(Ref(name))))
        self.turn(agent, name, ids)
        agent.release()

    def tensor_bytes(self) -> int:
        return sum(path.lstat().st_size for path in self.store.layout.domains.rglob("*.safetensors"))


@contextmanager
def counting_flushes() -> Iterator[list[Path]]:
    """What is flushed meanwhile, file by file and folder by folder."""
    flushed: list[Path] = []

    def note(step: str, path: Path) -> None:
        if step == "flush":
            flushed.append(path)

    files.fault = note
    try:
        yield flushed
    finally:
        files.fault = None


def moves(bench: Bench, repeats: int) -> dict[str, float]:
    """Time, flushes and tensor bytes of fork, snapshot and restore."""
    store, number = bench.store, iter(range(1 << 20))
    runs: dict[str, Callable[[], object]] = {
        "fork": lambda: lifecycle.fork(store, Ref("agent"), f"copy{next(number)}"),
        "snapshot": lambda: lifecycle.snapshot(store, Ref("agent"), f"state{next(number)}"),
        "restore": lambda: lifecycle.restore(store, Ref("agent", back=1), 0),
    }
    found: dict[str, float] = {}
    for name, run in runs.items():
        run()  # the first one makes folders
        before = bench.tensor_bytes()
        with counting_flushes() as flushed:
            times = [seconds(run) for _ in range(repeats)]
        found[f"{name}: ms"] = median(times) * 1000
        found[f"{name}: flushes"] = len(flushed) / repeats
        found[f"{name}: bytes of blocks"] = bench.tensor_bytes() - before
    return found


def measure(model: LoadedModel, ids: list[int], tokens: int, repeats: int) -> dict[str, float]:
    """All figures at one length, by name."""
    with new_store() as store:
        bench = Bench(store, model, ids[: tokens + 1])  # the last one is pending
        agent_bytes = disk_bytes(store.layout.root)
        rest = ids[tokens + 1 :]
        for number in range(FORKS):
            bench.fork_and_extend(number, rest[number + 1 : number + 1 + NEW])
        forks_bytes = disk_bytes(store.layout.root)
        found = [bench.turn(bench.agent, "agent", rest[n * NEW : (n + 1) * NEW]) for n in range(TURNS)]
        written, least = (sum(column) for column in zip(*found, strict=True))
        new = TURNS * NEW * sum(bytes_per_token(group, CODEC) for group in bench.spec.groups)
        return {
            OVER_LEAST: written / least,
            OVER_NEW: written / new,
            "agent on disk: MB": agent_bytes / 1e6,
            f"with {FORKS} forks, {NEW} tokens on: MB": forks_bytes / 1e6,
            **moves(bench, repeats),
        }


def rows_of(found: dict[int, dict[str, float]]) -> list[Row]:
    """A row for each figure, and a column for each length."""
    names = next(iter(found.values()))
    return [{"figure": name, **{f"{n:,} tokens": figures[name] for n, figures in found.items()}} for name in names]


def draw(axes: Any, rows: list[Row]) -> None:
    lengths = [key for key in rows[0] if key != "figure"]
    shown = {str(row["figure"]): row for row in rows if row["figure"] in (OVER_LEAST, OVER_NEW)}
    bars(axes, lengths, {name: [float(row[key] or 0) for key in lengths] for name, row in shown.items()})
    axes.set_ylabel("bytes written by a turn of 64 tokens")


def main() -> None:
    parser = options("turn", __doc__ or "")
    add_model(parser)
    add_text(parser)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 8192])
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    model = open_model(args.model)
    ids = opening_tokens(model, args.text, max(args.tokens) + 1 + TURNS * NEW)
    found = {n: measure(model, ids, n, args.repeats) for n in args.tokens}
    finish("turn", args, rows_of(found), draw)


if __name__ == "__main__":
    main()
