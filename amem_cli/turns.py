"""Shared by the commands that run turns: which model runs, and how a turn is reported."""

from typing import TYPE_CHECKING, Any

from amem_cli.shell.options import Call
from amem_cli.shell.output import Output, ProgressBar, counted, digest, human_size
from amem_cli.shell.signals import Stop
from kvstore.errors import NotFoundError

if TYPE_CHECKING:
    from amem_cli.engine.models.registry import ModelEntry
    from amem_cli.engine.turns.engine import Engine
    from amem_cli.engine.turns.requests import TurnResult, Watcher
    from kvstore.format.records import AgentRef
    from kvstore.store import Store


def find_agent(store: "Store | None", name: str) -> "AgentRef | None":
    """The agent of that name, or None if it or the store does not exist yet."""
    if store is None:
        return None
    try:
        return store.agent(name)
    except NotFoundError:
        return None


def choose_model(call: Call, name: str | None, store: "Store | None", agent: "AgentRef | None") -> "ModelEntry":
    """The model `name`, else the agent's own, else the only registered one.

    Whether `name` is the model that made the agent is checked later, by the turn.
    Raises NotFoundError and UsageError.
    """
    from amem_cli.engine.models import registry

    if name is None and store is not None and agent is not None:
        name = store.manifest(agent.domain, agent.manifest).model.name
    return registry.find(call.layout, name)


def load_engine(call: Call, store: "Store", entry: "ModelEntry") -> "Engine":
    """Load the model. This takes seconds, and is the first import of MLX."""
    from amem_cli.engine.turns.engine import Engine

    return Engine(store, entry, call.cache_dir)


def watcher_of(bar: ProgressBar, stop: Stop) -> "Watcher":
    """A watcher that shows progress in `bar` and ends the turn on a signal."""
    from amem_cli.engine.turns.requests import Watcher

    return Watcher(on_progress=lambda at: bar.update(at.done, at.total, at.tokens_per_second), should_stop=stop)


def json_fields(turn: "TurnResult") -> dict[str, Any]:
    """The JSON fields that every turn has, in their order."""
    return {
        "agent": turn.agent,
        "model": turn.model,
        "domain": turn.domain,
        "manifest": digest(turn.manifest),
        "before": digest(turn.before),
        "tokens": turn.tokens,
        "reused": turn.reused,
        "prefilled": turn.prefilled,
        "generated": turn.generated,
        "parted_at": turn.parted_at,
        "load_ms": turn.load_ms,
        "ttft_ms": turn.ttft_ms,
        "new_blocks": turn.new_blocks,
        "bytes_written": turn.bytes_written,
        "seconds": turn.seconds,
        "complete": turn.complete,
        "recomputed": turn.recomputed,
    }


def answer_fields(turn: "TurnResult") -> dict[str, Any]:
    """The JSON fields that a generated answer has beside those of every turn."""
    return {"text": turn.text, "finish": turn.finish, "seed": turn.seed, "temp": turn.temp}


def print_summary(out: Output, turn: "TurnResult") -> None:
    """The figures of a turn as a line of text."""
    parts = [f"{counted(turn.tokens, 'token')} ({turn.reused} reused, {turn.prefilled} prefilled)"]
    if turn.ttft_ms is not None:
        parts.append(f"first token in {turn.ttft_ms / 1000:.2f} s")
    if turn.generated:
        parts.append(f"{turn.generated} generated")
    parts.append(f"{counted(turn.new_blocks, 'new block')}, {human_size(turn.bytes_written)} written")
    parts.append(f"{turn.seconds:.2f} s")
    out.info(f"{turn.agent}: {'; '.join(parts)}")
    if turn.recomputed:
        out.info(f"{turn.agent}: cache recomputed from tokens")
