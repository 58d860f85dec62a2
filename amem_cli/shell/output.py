"""What the user reads: answers and JSON on standard output, everything else on standard error.

In text mode standard output has only the answer or the REF that a command created. With `--json` it has one object
per line, each written at once, and the last is always a `result` or an `error`.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from shutil import get_terminal_size
from typing import Any, TextIO

from kvstore.errors import AmemError

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_GAP = 2  # spaces between the columns of a table
# Escape sequences in a model's answer could rewrite the screen or the terminal's title; newlines and tabs are text.
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """`text` with control characters escaped as `\\x1b`, so that a terminal does not interpret them."""
    return text.translate(_CONTROLS)


def human_size(size: int) -> str:
    """Bytes for people, in decimal units: `1.2 GB`."""
    value = float(size)
    for unit in _UNITS:
        if value < 999.5 or unit == _UNITS[-1]:
            break
        value /= 1000
    return f"{size} B" if unit == "B" else f"{value:.3g} {unit}"


def counted(number: int, noun: str, plural: str = "") -> str:
    """A number with its noun: `1 block`, `2 blocks`."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


def local_time(utc: str) -> str:
    """An RFC 3339 time in the local zone, with its offset."""
    return datetime.fromisoformat(utc).astimezone().isoformat(" ", "seconds")


def digest(sha256: str | None) -> str | None:
    """A digest as users write it: `sha256:HEX`."""
    return None if sha256 is None else f"sha256:{sha256}"


@dataclass(frozen=True)
class Output:
    """How a command writes: as text or JSON, how much, and with which colours."""

    json: bool = False
    quiet: bool = False
    verbose: bool = False
    color: bool = True

    def line(self, kind: str, /, **fields: Any) -> None:
        """One JSON line of type `kind`; nothing in text mode."""
        if self.json:
            text = json.dumps({"type": kind, **fields}, ensure_ascii=False, separators=(",", ":"))
            # A lone surrogate, from a file name that is not UTF-8, becomes its JSON escape.
            sys.stdout.buffer.write(text.encode("utf-8", "backslashreplace") + b"\n")
            sys.stdout.buffer.flush()

    def result(self, command: str, shown: str | None = None, /, *, ok: bool = True, **fields: Any) -> None:
        """End a command: print `shown` in text mode, the `result` object with `--json`."""
        if self.json:
            self.line("result", command=command, ok=ok, **fields)
        if shown is not None:
            self.print(shown)

    def print(self, text: str) -> None:
        """A line on standard output in text mode."""
        self.piece(text + "\n")

    def piece(self, text: str) -> None:
        """A part of the answer in text mode, written at once; on a terminal with control characters escaped."""
        if self.json:
            return
        sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
        sys.stdout.flush()

    def info(self, text: str) -> None:
        """Figures and explanations on standard error; none with `--quiet` or `--json`."""
        if not (self.quiet or self.json):
            _stderr(text)

    def warn(self, text: str) -> None:
        """A warning on standard error, even with `--quiet` and `--json`."""
        _stderr(f"amem: {text}")

    def error(self, error: AmemError) -> None:
        """End a failed command: a line on standard error, and the `error` object with `--json`."""
        _stderr(f"amem: {error.message}")
        if error.hint:
            _stderr(f"hint: {error.hint}")
        self.line("error", code=error.code, exit=error.exit_code, message=error.message, hint=error.hint)

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
        """Rows under a header: a table on a terminal, aligned text in a pipe. Columns in `right` are right-aligned.

        On a terminal that is too narrow, each row becomes a paragraph.
        """
        if self.json:
            return
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        if sys.stdout.isatty():
            if sum(widths) + _GAP * (len(widths) - 1) <= get_terminal_size().columns:
                self._rich_table(header, rows, right)
            else:
                self._paragraphs(header, rows)
            return
        for row in (header, *rows):
            cells = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
            self.print((" " * _GAP).join(cells).rstrip())

    def _rich_table(self, header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int]) -> None:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        padding = (0, _GAP - 1, 0, 0)  # the box adds a space
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=padding, header_style="bold")
        for place, name in enumerate(header):
            table.add_column(name, justify="right" if place in right else "left")
        for row in rows:
            table.add_row(*(Text(printable(cell)) for cell in row))
        _console(sys.stdout, self.color).print(table)

    def _paragraphs(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        width = max(map(len, header))
        for row in rows:
            self.print(row[0])
            for name, cell in zip(header[1:], row[1:], strict=True):
                self.print(f"  {name:<{width}}  {cell}")

    @contextmanager
    def progress(self, what: str) -> Iterator["ProgressBar"]:
        """A progress bar on standard error while the context lasts, if that is a terminal."""
        bar = ProgressBar(what, self.color, shown=sys.stderr.isatty() and not self.quiet)
        try:
            yield bar
        finally:
            bar.close()


class ProgressBar:
    """One line with the progress of a prefill, erased at the end. It starts no thread."""

    def __init__(self, what: str, color: bool, shown: bool) -> None:
        self._what, self._color, self._shown = what, color, shown
        self._bar: Any = None

    def update(self, done: int, total: int, tokens_per_second: float) -> None:
        """Show `done` of `total` tokens."""
        if not self._shown:
            return
        if self._bar is None:
            self._bar = self._start()
        self._bar.update(0, completed=done, total=total, rate=f"{tokens_per_second:.0f} tokens/s", refresh=True)

    def close(self) -> None:
        """Erase the line; later updates show nothing."""
        self._shown = False
        if self._bar is not None:
            self._bar.stop()

    def _start(self) -> Any:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as RichProgress

        bar = RichProgress(
            TextColumn(self._what),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            console=_console(sys.stderr, self._color),
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        bar.add_task(self._what, rate="")
        bar.start()
        return bar


def _console(file: TextIO, color: bool) -> Any:
    from rich.console import Console

    return Console(file=file, no_color=not color, highlight=False)


def _stderr(text: str) -> None:
    sys.stderr.write(printable(text) + "\n")
    sys.stderr.flush()
