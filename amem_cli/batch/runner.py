"""Runs request lines: reads them as they arrive, submits those that may run to the scheduler, and prints their results.

All of it runs on the thread that owns MLX, between two rounds of the scheduler's loop.
"""

import time
from collections import Counter
from concurrent.futures import CancelledError
from dataclasses import replace

from amem_cli import turns
from amem_cli.batch.lines import Lines
from amem_cli.batch.order import Dropped, Order
from amem_cli.batch.requests import Request, id_of, parse, read_object
from amem_cli.batch.steps import Fields, Outcome, request_steps
from amem_cli.batch.table import Row, Table
from amem_cli.engine.models import registry
from amem_cli.engine.turns.engine import Engine
from amem_cli.engine.turns.scheduler import Scheduler, Ticket
from amem_cli.engine.turns.steps import Steps
from amem_cli.shell import error_boundary, signals
from amem_cli.shell.options import Call
from kvstore.errors import AmemError, ModelMismatchError, PartialError, UsageError
from kvstore.naming import file_name

STATES = ("done", "failed", "skipped", "interrupted")
_TOTALS = ("prefilled", "reused", "generated", "new_blocks", "bytes_written")
_POLL = 0.1  # seconds between checks for a signal, while no model is loaded


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
        """Raises NotFoundError if there is no such model."""
        self._call, self._lines, self._stop, self._table = call, lines, stop, table
        self._out = replace(call.out, json=True)
        self._memory, self._batched = memory, batched
        self._entry = registry.find(call.layout, model) if model is not None else None
        self._scheduler: Scheduler | None = None
        self._order = Order()
        self._read = 0  # lines
        self._running: dict[Ticket[Outcome], Request] = {}
        self._answers: dict[str, str] = {}  # id of a chat → its text
        self._rows: dict[str, Row] = {}
        self._decoding_since: dict[Ticket[Outcome], float] = {}  # time of the first token
        self._totals: Counter[str] = Counter(dict.fromkeys((*STATES, *_TOTALS), 0))

    def run(self) -> Fields:
        """Run until the end of the file, or until a signal. Returns the totals.

        If reading fails, the lines read so far are run first. Raises OSError then.
        """
        started = time.perf_counter()
        while self._scheduler is None and self._step():
            self._lines.wait(_POLL)
        if self._scheduler is not None:
            self._scheduler.run(self._step)
        if self._lines.error is not None:
            raise self._lines.error
        steps = self._scheduler.figures.row_by_row_steps if self._scheduler else 0
        return {**self._totals, "row_by_row_steps": steps, "seconds": time.perf_counter() - started}

    def _step(self) -> bool:
        """Read, submit and report between two rounds. Returns whether there is more to wait for."""
        if self._stop():
            self._give_up()
        elif not self._lines.ended:
            self._take_lines()
        self._collect()
        while self._order.ready and not self._stop():
            self._start(self._order.ready.popleft())
        while self._order.dropped:
            self._print_dropped(self._order.dropped.popleft())
        self._show_table()
        return bool(self._running or self._order.ready) or not (self._lines.ended or self._stop())

    def _take_lines(self) -> None:
        for line in self._lines.take():
            self._read += 1
            if line.strip():
                self._add(line)
        if self._lines.ended:
            self._order.close()

    def _add(self, line: bytes) -> None:
        identity: Fields = {"line": self._read, "id": None, "op": None, "agent": None}
        try:
            values = read_object(line)
            identity["id"] = id_of(values)
            try:
                request = parse(self._read, values)
            except UsageError:
                if identity["id"] is not None:
                    self._order.add_failed(identity["id"])
                raise
            identity = _identity(request)
            self._order.add(request)
        except UsageError as error:
            self._end("failed", identity, error)

    def _start(self, request: Request) -> None:
        """Submit a request to the scheduler; the first one loads the model."""
        try:
            text = request.resolved_text(self._answers)
            scheduler = self._scheduler or self._load(request)
            model = request.operation.model
            if model is not None and not self._is_loaded(model):
                loaded = scheduler.engine.model.identity.name
                raise ModelMismatchError(f"this batch runs {loaded}, not {model}", "run one batch for each model")
        except Exception as error:
            self._fail(request, error)
            return
        agent = file_name(request.agent.agent)
        row = self._rows[agent] = Row(request.agent.agent)

        def turn(ticket: Ticket[Outcome]) -> Steps[Outcome]:
            return request_steps(scheduler.engine, request, text, row, ticket)

        ticket = scheduler.submit(agent, turn, request.operation.priority, request.operation.timeout)
        self._running[ticket] = request

    def _load(self, request: Request) -> Scheduler:
        """Load the model of the command line, else that of the first request, else that of its agent."""
        call = self._call
        store = call.open_store() if call.layout.format.exists() or request.op != "prefill" else None
        if self._entry is None:
            agent = turns.find_agent(store, request.agent.agent)
            if agent is None and request.fork_from is not None:
                agent = turns.find_agent(store, request.fork_from.agent)
            entry = turns.choose_model(call, request.operation.model, store, agent)
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
        """Print the results of the requests that have ended."""
        for ticket in [ticket for ticket in self._running if ticket.future.done()]:
            request = self._running.pop(ticket)
            self._decoding_since.pop(ticket, None)
            error = ticket.future.exception()
            if error is not None:
                self._fail(request, error)
                continue
            outcome = ticket.future.result()
            if outcome.turn is not None:
                self._totals.update({key: outcome.fields[key] for key in _TOTALS})
            if not outcome.whole:
                self._interrupted(request, outcome.fields)
                continue
            if outcome.turn is not None and outcome.turn.text is not None:
                self._answers[request.id] = outcome.turn.text
            self._end("done", _identity(request), more=outcome.fields)
            self._order.settle(request.id, done=True)

    def _fail(self, request: Request, caught: BaseException) -> None:
        if isinstance(caught, CancelledError):
            self._interrupted(request, {})
            return
        error = error_boundary.to_amem_error(caught) or error_boundary.report_bug(caught, self._call.command)
        self._end("failed", _identity(request), error)
        self._order.settle(request.id, done=False)

    def _interrupted(self, request: Request, fields: Fields) -> None:
        signum = self._stop.signum
        timeout = request.operation.timeout
        why = f"timeout of {timeout} s reached" if signum is None else f"interrupted by signal {int(signum)}"
        error = {"code": "interrupted", "exit": 1 if signum is None else 128 + signum, "message": why, "hint": None}
        self._end("interrupted", _identity(request), more=fields | error)
        self._order.settle(request.id, done=False)

    def _print_dropped(self, dropped: Dropped) -> None:
        if dropped.error is not None:
            self._end("failed", _identity(dropped.request), dropped.error)
            return
        skipped = PartialError(f"skipped: {dropped.failed!r}, which it waits for, did not succeed")
        self._end("skipped", _identity(dropped.request), skipped, {"code": "skipped"})

    def _give_up(self) -> None:
        """End all requests, running or not started; no more lines are read."""
        for ticket in self._running:
            ticket.cancel()
        for request in self._order.give_up():
            self._interrupted(request, {})

    def _end(self, state: str, identity: Fields, error: AmemError | None = None, more: Fields | None = None) -> None:
        """Count a request that has ended, and print its line."""
        self._totals[state] += 1
        failure: Fields = {}
        if error is not None:
            failure = {"code": error.code, "exit": error.exit_code, "message": error.message, "hint": error.hint}
        self._table.close()
        try:
            self._out.line("turn", **{**identity, "ok": state == "done", "state": state, **failure, **(more or {})})
        except BrokenPipeError:
            self._stop.request(signals.CLOSED, None)

    def _show_table(self) -> None:
        """Show the running requests with their figures; those that wait for memory come last."""
        for ticket, request in self._running.items():
            if ticket.decoded:
                since = self._decoding_since.setdefault(ticket, time.monotonic())
                row = self._rows[file_name(request.agent.agent)]
                row.state, row.tokens = "answering", ticket.decoded
                row.tokens_per_second = ticket.decoded / max(time.monotonic() - since, 1e-3)
        running = [self._rows[file_name(request.agent.agent)] for request in self._running.values()]
        if running:
            self._table.show(sorted(running, key=lambda row: row.state == "waiting"))


def _identity(request: Request) -> Fields:
    """The JSON fields that identify a request."""
    identity = {"line": request.line, "id": request.id, "op": request.op, "agent": request.agent.agent}
    return identity if request.phase is None else {**identity, "phase": request.phase}
