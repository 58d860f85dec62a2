"""Runs request lines: takes them as they come, hands to the scheduler what may run, and tells what became of each.

Everything happens on the thread that owns MLX, between two rounds of the scheduler's loop.
"""

import time
from collections import Counter
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from amem_cli import turns
from amem_cli.batch.lines import Lines
from amem_cli.batch.order import Dropped, Order
from amem_cli.batch.requests import Request, id_of, parse, read_object
from amem_cli.batch.table import Row, Table
from amem_cli.engine.models import registry
from amem_cli.engine.prompt.transcript import Text
from amem_cli.engine.turns.engine import Engine
from amem_cli.engine.turns.requests import ChatOptions, Generation, PrefillOptions, PrefillProgress, TurnResult, Watcher
from amem_cli.engine.turns.scheduler import Scheduler, Ticket
from amem_cli.engine.turns.steps import Steps, do
from amem_cli.shell import failures, signals
from amem_cli.shell.options import Call
from amem_cli.shell.output import digest
from kvstore import lifecycle
from kvstore.errors import AmemError, ModelMismatchError, PartialError, UsageError
from kvstore.naming import file_name
from kvstore.store import Store

STATES = ("done", "failed", "skipped", "interrupted")
_SUMS = ("prefilled", "reused", "generated", "new_blocks", "bytes_written")
_POLL = 0.1  # seconds between looks for a signal, while no model is loaded
Fields = dict[str, Any]


@dataclass(frozen=True)
class _Outcome:
    """What a request's line tells, and whether it ran to its end."""

    fields: Fields
    whole: bool = True


class Batch:
    """One run of `amem batch`. `memory`: bytes for agents' caches."""

    def __init__(
        self,
        call: Call,
        lines: Lines,
        stop: signals.Stop,
        table: Table,
        *,
        model: str | None,
        memory: int,
        batched: bool,
    ) -> None:
        """Raises NotFoundError where there is no such model."""
        self._call, self._lines, self._stop, self._table = call, lines, stop, table
        self._out = replace(call.out, json=True)
        self._memory, self._batched = memory, batched
        self._entry = registry.find(call.layout, model) if model is not None else None
        self._scheduler: Scheduler | None = None
        self._order = Order()
        self._read = 0  # lines
        self._running: dict[Ticket[_Outcome], Request] = {}
        self._answers: dict[str, str] = {}  # id of a chat → its text
        self._rows: dict[str, Row] = {}
        self._answering: dict[Ticket[_Outcome], float] = {}  # since when
        self._totals: Counter[str] = Counter(dict.fromkeys((*STATES, *_SUMS), 0))

    def run(self) -> Fields:
        """Run until the end of the file, or until a signal. Returns the totals.

        Where the file cannot be read any further, what came is run, and OSError is raised.
        """
        begun = time.perf_counter()
        while self._scheduler is None and self._step():
            self._lines.wait(_POLL)
        if self._scheduler is not None:
            self._scheduler.run(self._step)
        if self._lines.error is not None:
            raise self._lines.error
        steps = self._scheduler.figures.row_by_row_steps if self._scheduler else 0
        return {**self._totals, "row_by_row_steps": steps, "seconds": time.perf_counter() - begun}

    def _step(self) -> bool:
        """What is done between two rounds. Returns whether there is anything to wait for."""
        if self._stop():
            self._give_up()
        elif not self._lines.ended:
            self._take_lines()
        self._collect()
        while self._order.ready and not self._stop():
            self._start(self._order.ready.popleft())
        while self._order.dropped:
            self._tell_dropped(self._order.dropped.popleft())
        self._show()
        return bool(self._running or self._order.ready) or not (self._lines.ended or self._stop())

    def _take_lines(self) -> None:
        for line in self._lines.take():
            self._read += 1
            if line.strip():
                self._add(line)
        if self._lines.ended:
            self._order.close()

    def _add(self, line: bytes) -> None:
        named: Fields = {"line": self._read, "id": None, "op": None, "agent": None}
        try:
            values = read_object(line)
            named["id"] = id_of(values)
            try:
                request = parse(self._read, values)
            except UsageError:
                if named["id"] is not None:
                    self._order.add_failed(named["id"])
                raise
            named = _named(request)
            self._order.add(request)
        except UsageError as error:
            self._end("failed", named, error)

    def _start(self, request: Request) -> None:
        """Hand a request to the scheduler; the first one that can run has the model loaded."""
        try:
            text = request.said(self._answers)
            scheduler = self._scheduler or self._load(request)
            if request.model is not None and not self._is_loaded(request.model):
                raise ModelMismatchError(
                    f"another model than {scheduler.engine.model.identity.name} is loaded", "run one batch for each"
                )
        except Exception as error:
            self._fail(request, error)
            return
        agent = file_name(request.agent.agent)
        row = self._rows[agent] = Row(request.agent.agent)
        turn = partial(_turn, scheduler.engine, request, text, row)
        self._running[scheduler.submit(agent, turn, request.priority, request.timeout)] = request

    def _load(self, request: Request) -> Scheduler:
        """Load the model that was asked for, else the first request's, else its agent's."""
        call = self._call
        store = call.open_store() if call.layout.format.exists() or request.op != "prefill" else None
        if self._entry is None:
            agent = turns.find_agent(store, request.agent.agent)
            if agent is None and request.fork_from is not None:
                agent = turns.find_agent(store, request.fork_from.agent)
            entry = turns.choose_model(call, request.model, store, agent)
        else:
            entry = self._entry
        engine = Engine(store or call.create_store(), entry, call.cache_dir, memory=self._memory)
        self._entry, self._scheduler = entry, Scheduler(engine, self._batched, self._warn_of_fallback)
        self._lines.wake = self._scheduler.wake
        return self._scheduler

    def _warn_of_fallback(self, error: Exception) -> None:
        kind = type(error).__name__  # its message could hold text of an agent
        self._out.warn(f"a decode step for several agents failed ({kind}): it runs again, one agent at a time")

    def _is_loaded(self, model: str) -> bool:
        found, loaded = registry.find(self._call.layout, model), self._entry
        return loaded is not None and (found.source, found.adapter) == (loaded.source, loaded.adapter)

    def _collect(self) -> None:
        """Tell what is over."""
        for ticket in [ticket for ticket in self._running if ticket.future.done()]:
            request = self._running.pop(ticket)
            self._answering.pop(ticket, None)
            error = ticket.future.exception()
            if error is not None:
                self._fail(request, error)
                continue
            outcome = ticket.future.result()
            self._totals.update({key: outcome.fields.get(key, 0) for key in _SUMS})
            if not outcome.whole:
                self._interrupted(request, outcome.fields)
                continue
            if request.op == "chat":
                self._answers[request.id] = outcome.fields["text"]
            self._end("done", _named(request), more=outcome.fields)
            self._order.settle(request.id, done=True)

    def _fail(self, request: Request, caught: BaseException) -> None:
        if isinstance(caught, CancelledError):
            self._interrupted(request, {})
            return
        error = failures.expected(caught) or failures.bug(caught, self._call.command)
        self._end("failed", _named(request), error)
        self._order.settle(request.id, done=False)

    def _interrupted(self, request: Request, told: Fields) -> None:
        signum = self._stop.signum
        why = f"its {request.timeout} seconds were over" if signum is None else f"signal {int(signum)} came"
        more = {"code": "interrupted", "exit": 1 if signum is None else 128 + signum, "message": why, "hint": None}
        self._end("interrupted", _named(request), more=told | more)
        self._order.settle(request.id, done=False)

    def _tell_dropped(self, dropped: Dropped) -> None:
        if dropped.error is not None:
            self._end("failed", _named(dropped.request), dropped.error)
            return
        skipped = PartialError(f"{dropped.failed!r} is not done, and this waits for it")
        self._end("skipped", _named(dropped.request), skipped, {"code": "skipped"})

    def _give_up(self) -> None:
        """End what runs, and what has not begun; no more lines are read."""
        for ticket in self._running:
            ticket.cancel()
        for request in self._order.give_up():
            self._interrupted(request, {})

    def _end(self, state: str, named: Fields, error: AmemError | None = None, more: Fields | None = None) -> None:
        """Count a line, and tell what became of it."""
        self._totals[state] += 1
        wrong: Fields = {}
        if error is not None:
            wrong = {"code": error.code, "exit": error.exit_code, "message": error.message, "hint": error.hint}
        self._table.close()
        try:
            self._out.line("turn", **{**named, "ok": state == "done", "state": state, **wrong, **(more or {})})
        except BrokenPipeError:
            self._stop.hear(signals.CLOSED, None)

    def _show(self) -> None:
        """What runs, each with its figures; agents that wait come last."""
        for ticket, request in self._running.items():
            if ticket.decoded:
                since = self._answering.setdefault(ticket, time.monotonic())
                row = self._rows[file_name(request.agent.agent)]
                row.state, row.tokens = "answering", ticket.decoded
                row.tokens_per_second = ticket.decoded / max(time.monotonic() - since, 1e-3)
        running = [self._rows[file_name(request.agent.agent)] for request in self._running.values()]
        if running:
            self._table.show(sorted(running, key=lambda row: row.state == "waiting"))


def _named(request: Request) -> Fields:
    """How a line is told apart from others."""
    named = {"line": request.line, "id": request.id, "op": request.op, "agent": request.agent.agent}
    return named if request.phase is None else {**named, "phase": request.phase}


def _turn(engine: Engine, request: Request, text: str, row: Row, ticket: Ticket[_Outcome]) -> Steps[_Outcome]:
    """A request's steps."""
    if ticket.should_stop():
        raise CancelledError
    if request.fork_from is not None:
        yield from do(partial(_fork, engine.store, request))
    if request.op == "snapshot":
        return _Outcome((yield from do(partial(_snapshot, engine.store, request))))

    def progress(at: PrefillProgress) -> None:
        row.state, row.tokens, row.tokens_per_second = f"prefill of {at.total:,}", at.done, at.tokens_per_second

    turn = yield from _steps(engine, request, text, Watcher(on_progress=progress, should_stop=ticket.should_stop))
    if request.op == "chat":
        answer = {"text": turn.text, "finish": turn.finish, "seed": turn.seed, "temp": turn.temp}
        return _Outcome({**turns.fields(turn), **answer}, whole=turn.finish != "interrupted")
    return _Outcome(turns.fields(turn), whole=turn.complete and (turn.changed or request.op == "prefill"))


def _steps(engine: Engine, request: Request, text: str, watcher: Watcher) -> Steps[TurnResult]:
    texts = [Text(text, request.role, request.phase, request.raw)] if text else []
    if request.op == "chat":
        generation = Generation(request.max_tokens, request.temp, request.top_p, request.seed, request.stop)
        return engine.chat_steps(request.agent, texts, generation, ChatOptions(save=request.save), watcher)
    if request.op == "extend":
        return engine.extend_steps(request.agent.agent, texts, watcher=watcher)
    options = PrefillOptions(request.system, request.domain, request.replace, request.codec)
    return engine.prefill_steps(request.agent.agent, texts, options, watcher)


def _fork(store: Store, request: Request) -> None:
    """Make the agent of a request, unless there is one of that name."""
    if request.fork_from is not None and turns.find_agent(store, request.agent.agent) is None:
        lifecycle.fork(store, request.fork_from, request.agent.agent)


def _snapshot(store: Store, request: Request) -> Fields:
    made, is_new = lifecycle.snapshot(store, request.agent, request.name, request.note)
    ref = f"{made.agent}@{made.name}"
    return {"ref": ref, "name": made.name, "manifest": digest(made.manifest), "note": made.note, "is_new": is_new}
