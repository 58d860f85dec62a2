"""The live table of running agents on standard error, erased at the end."""

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from amem_cli.shell.output import printable

_EVERY = 0.2  # seconds


@dataclass
class Row:
    """An agent: its state, the tokens processed so far in that state, and their rate."""

    agent: str
    state: str = "waiting"
    tokens: int = 0
    tokens_per_second: float = 0.0


class Table:
    """Drawn by `show`, at most every fifth of a second. It starts no thread."""

    def __init__(self, color: bool, shown: bool) -> None:
        self._color, self._shown = color, shown
        self._live: Any = None
        self._drawn = 0.0

    def show(self, rows: Iterable[Row]) -> None:
        """Redraw the table, if the last time is long enough ago."""
        if not self._shown or time.monotonic() - self._drawn < _EVERY:
            return
        from rich.table import Table as Grid

        self._drawn = time.monotonic()
        grid = Grid(box=None, pad_edge=False)
        for name in ("AGENT", "STATE", "TOKENS", "TOKENS/S"):
            grid.add_column(name, justify="right" if name.startswith("TOKENS") else "left")
        for row in rows:
            rate = f"{row.tokens_per_second:.0f}" if row.tokens_per_second else ""
            grid.add_row(printable(row.agent), row.state, f"{row.tokens:,}", rate)
        if self._live is None:
            self._live = self._start()
        self._live.update(grid, refresh=True)

    def close(self) -> None:
        """Erase the table, so that lines can be written; the next `show` draws it again."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _start(self) -> Any:
        from rich.console import Console
        from rich.live import Live

        console = Console(file=sys.stderr, no_color=not self._color, highlight=False)
        live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False)
        live.start()
        return live
