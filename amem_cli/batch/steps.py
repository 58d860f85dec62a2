"""The steps of one request: its fork, then its operation, as the scheduler runs them."""

from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any

from amem_cli import turns
from amem_cli.batch.requests import Chat, Extend, Prefill, Request, Snapshot
from amem_cli.batch.table import Row
from amem_cli.engine.prompt.transcript import Text
from amem_cli.engine.turns.engine import Engine
from amem_cli.engine.turns.requests import ChatOptions, Generation, PrefillOptions, PrefillProgress, TurnResult, Watcher
from amem_cli.engine.turns.scheduler import Ticket
from amem_cli.engine.turns.steps import Steps, do
from amem_cli.shell.output import digest
from kvstore import lifecycle
from kvstore.naming import Ref
from kvstore.store import Store

Fields = dict[str, Any]  # of a JSON line


@dataclass(frozen=True)
class Outcome:
    """The JSON fields of a request that ran, its turn unless it is a snapshot, and whether it ran to its end."""

    fields: Fields
    turn: TurnResult | None = None
    whole: bool = True


def request_steps(engine: Engine, request: Request, text: str, row: Row, ticket: Ticket[Outcome]) -> Steps[Outcome]:
    """Fork the agent if asked to, then run the operation; `text` is the text to send, `row` shows its progress."""
    if ticket.should_stop():
        raise CancelledError
    operation, source = request.operation, request.fork_from
    if source is not None:
        yield from do(lambda: _fork(engine.store, source, request.agent.agent))
    if isinstance(operation, Snapshot):
        return Outcome((yield from do(lambda: _snapshot(engine.store, request.agent, operation))))

    def progress(at: PrefillProgress) -> None:
        row.state, row.tokens, row.tokens_per_second = f"prefill of {at.total:,}", at.done, at.tokens_per_second

    watcher = Watcher(on_progress=progress, should_stop=ticket.should_stop)
    turn = yield from _turn_steps(engine, request, operation, text, watcher)
    if isinstance(operation, Chat):
        fields = turns.json_fields(turn) | turns.answer_fields(turn)
        return Outcome(fields, turn, whole=turn.finish != "interrupted")
    whole = turn.complete and (turn.changed or isinstance(operation, Prefill))
    return Outcome(turns.json_fields(turn), turn, whole)


def _turn_steps(
    engine: Engine, request: Request, operation: Chat | Extend | Prefill, text: str, watcher: Watcher
) -> Steps[TurnResult]:
    """The engine's steps of an operation that takes text."""
    if isinstance(operation, Chat):
        texts = [Text(text, label=operation.phase)] if text else []
        stops = (operation.stop,) if isinstance(operation.stop, str) else operation.stop
        generation = Generation(operation.max_tokens, operation.temp, operation.top_p, operation.seed, stops)
        return engine.chat_steps(request.agent, texts, generation, ChatOptions(save=operation.save), watcher)
    texts = [Text(text, operation.role, operation.phase, operation.raw)] if text else []
    if isinstance(operation, Extend):
        return engine.extend_steps(request.agent.agent, texts, watcher=watcher)
    options = PrefillOptions(operation.system, operation.domain, operation.replace, operation.codec)
    return engine.prefill_steps(request.agent.agent, texts, options, watcher)


def _fork(store: Store, source: Ref, name: str) -> None:
    """Fork `source` as the agent `name`, unless that exists."""
    if turns.find_agent(store, name) is None:
        lifecycle.fork(store, source, name)


def _snapshot(store: Store, state: Ref, operation: Snapshot) -> Fields:
    made, is_new = lifecycle.snapshot(store, state, operation.name, operation.note)
    ref = f"{made.agent}@{made.name}"
    return {"ref": ref, "name": made.name, "manifest": digest(made.manifest), "note": made.note, "is_new": is_new}
