"""`amem batch`: many agents' turns in one process, with NDJSON streamed in and out."""

import os
import sys
from contextlib import ExitStack, closing
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import Annotated

import typer

from amem_cli.shell import signals
from amem_cli.shell.inputs import STDIN
from amem_cli.shell.options import Call, ModelName, command, new_app
from amem_cli.shell.output import Output, counted
from amem_cli.shell.quantities import check_size, parse_size
from kvstore.errors import AmemError, NotFoundError, PartialError, UsageError

app = new_app()

MEMORY_SHARE = 4  # without --memory agents may take a quarter of the machine's memory

File = Annotated[str, typer.Argument(metavar="FILE", help="Requests, one JSON object per line; - is standard input.")]
Memory = Annotated[
    str | None,
    typer.Option("--memory", metavar="SIZE", callback=check_size, help="Memory for agents; default: a quarter of all."),
]
NoBatch = Annotated[bool, typer.Option("--no-batch", help="Decode agents one by one instead of together.")]


@command(app)
def batch(
    call: Call,
    file: File,
    memory: Memory = None,
    no_batch: NoBatch = False,
    model: ModelName = None,
) -> None:
    """Run many agents' turns, and write one JSON object for each as soon as it ends."""
    out = replace(call.out, json=True)
    try:
        with ExitStack() as stack:
            descriptor = sys.stdin.fileno() if file == STDIN else stack.enter_context(_open(file)).fileno()
            ok = _run(call, out, descriptor, model, parse_size(memory) if memory else _default_memory(), not no_batch)
    except AmemError as error:
        out.error(error)
        raise typer.Exit(error.exit_code) from error
    if not ok:
        raise typer.Exit(PartialError.exit_code)


def _run(call: Call, out: Output, descriptor: int, model: str | None, memory: int, batched: bool) -> bool:
    """Run the requests from the descriptor and print the totals. Returns whether all succeeded."""
    from amem_cli.batch.lines import Lines
    from amem_cli.batch.runner import STATES, Batch
    from amem_cli.batch.table import Table

    typed = os.isatty(descriptor)
    table = Table(call.out.color, shown=sys.stderr.isatty() and not (typed or call.out.quiet))
    with signals.listening() as stop, closing(table):
        totals = Batch(call, Lines(descriptor), stop, table, model=model, memory=memory, batched=batched).run()
    ok = not stop() and totals["done"] == sum(totals[state] for state in STATES)
    states = ", ".join(f"{totals[state]} {state}" for state in STATES if totals[state])
    generated = f"{counted(totals['generated'], 'token')} generated in {totals['seconds']:.2f} s"
    call.out.info(f"{states or 'no requests'}; {generated}")
    out.result(call.command, ok=ok, **totals)
    stop.finish()
    return ok


def _open(file: str) -> FileIO:
    """The file, unbuffered. Raises NotFoundError, and UsageError for a folder."""
    try:
        return Path(file).open("rb", buffering=0)
    except FileNotFoundError as error:
        raise NotFoundError(f"no such file: {file}") from error
    except IsADirectoryError as error:
        raise UsageError(f"{file} is a folder", "name a file in it, or - for standard input") from error


def _default_memory() -> int:
    """Bytes for agents without --memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // MEMORY_SHARE
