"""What `prefill` and `chat` share: which model runs, and how a turn is reported."""

from typing import TYPE_CHECKING, Any

from amem_cli.shell.options import Call
from amem_cli.shell.output import Output, digest, human_size
from kvstore.errors import NotFoundError

if TYPE_CHECKING:
    from amem_cli.engine.models.registry import ModelEntry
    from amem_cli.engine.turns.engine import Engine
    from amem_cli.engine.turns.requests import TurnResult
    from kvstore.format.records import AgentRef
    from kvstore.store import Store

# The order in which every turn is told, in `--json`.
_FIELDS = (
    "tokens",
    "reused",
    "prefilled",
    "generated",
    "parted_at",
    "load_ms",
    "ttft_ms",
    "new_blocks",
    "bytes_written",
    "seconds",
    "complete",
    "recomputed",
)


def find_agent(store: "Store | None", name: str) -> "AgentRef | None":
    """The agent of that name, or None where it is still to be made."""
    if store is None:
        return None
    try:
        return store.agent(name)
    except NotFoundError:
        return None


def choose_model(call: Call, name: str | None, store: "Store | None", agent: "AgentRef | None") -> "ModelEntry":
    """The model that was asked for, else the agent's own, else the only one that is registered.

    A named model is only checked against the agent's later on, never made the agent's.
    Raises NotFoundError and UsageError.
    """
    from amem_cli.engine.models import registry

    if name is None and store is not None and agent is not None:
        name = store.manifest(agent.domain, agent.manifest).model.name
    return registry.find(call.layout, name)


def load_engine(call: Call, store: "Store", entry: "ModelEntry") -> "Engine":
    """Load the model: seconds, and the only import of MLX."""
    from amem_cli.engine.turns.engine import Engine

    return Engine(store, entry, call.cache_dir)


def fields(turn: "TurnResult") -> dict[str, Any]:
    """A turn as `--json` tells it."""
    names = {"agent": turn.agent, "model": turn.model, "domain": turn.domain}
    states = {"manifest": digest(turn.manifest), "before": digest(turn.before)}
    return {**names, **states, **{key: getattr(turn, key) for key in _FIELDS}}


def tell(out: Output, turn: "TurnResult") -> None:
    """The figures of a turn, for people."""
    parts = [f"{turn.tokens} tokens ({turn.reused} reused, {turn.prefilled} prefilled)"]
    if turn.ttft_ms is not None:
        parts.append(f"first token in {turn.ttft_ms / 1000:.2f} s")
    if turn.generated:
        parts.append(f"{turn.generated} generated")
    parts.append(f"{turn.new_blocks} new blocks, {human_size(turn.bytes_written)} written")
    parts.append(f"{turn.seconds:.2f} s")
    out.say(f"{turn.agent}: {'; '.join(parts)}")
    if turn.recomputed:
        out.say(f"{turn.agent}: its cache was computed again from its tokens, since it was made")
