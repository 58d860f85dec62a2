"""Sizes, times, control characters, and what a terminal gets."""

import os
import sys

import pytest

from amem_cli.shell.output import human_size, local_time, printable
from tests.support.running import children
from tests.support.running.amem import COMMAND
from tests.support.running.terminal import on_terminal


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_600, "1 MB"), (1_234_567, "1.23 MB"), (2_500_000_000, "2.5 GB")],
)
def test_sizes_are_decimal(size: int, text: str) -> None:
    assert human_size(size) == text


def test_times_are_local_with_their_offset() -> None:
    environment = {**os.environ, "TZ": "Asia/Kolkata", "NOW": "2026-01-02T03:04:05.678901Z"}
    code = "import os; from amem_cli.shell.output import local_time; print(local_time(os.environ['NOW']))"
    done = children.run(sys.executable, "-c", code, env=environment)
    assert done.stdout == "2026-01-02 08:34:05+05:30\n"
    assert local_time("2026-01-02T03:04:05Z")


def test_control_characters_are_shown_not_obeyed() -> None:
    assert printable("a\x1b[2Jb\x9b\x07\r\n\tü") == "a\\x1b[2Jb\\x9b\\x07\\x0d\n\tü"


PIECE = "from amem_cli.shell.output import Output; Output().piece('x\\x1b[31my')"


def test_an_answer_cannot_drive_the_terminal() -> None:
    assert on_terminal(sys.executable, "-c", PIECE) == "x\\x1b[31my"
    assert children.run(sys.executable, "-c", PIECE).stdout == "x\x1b[31my"


@pytest.mark.usefixtures("store")
def test_a_terminal_gets_a_table_and_colours_can_be_off(environment: dict[str, str]) -> None:
    command = (*COMMAND, "inspect")
    no_color = {**environment, "NO_COLOR": "1"}
    shown = on_terminal(*command, env=environment)
    assert "tiny" in shown
    assert "\x1b[1m" in shown
    uncoloured = (on_terminal(*command, "--no-color", env=environment), on_terminal(*command, env=no_color))
    assert all("\x1b[3" not in text for text in uncoloured)


PROGRESS = """
from amem_cli.shell.output import Output
with Output().progress("prefill") as bar:
    bar.update(5, 10, 100.0)
print("done")
"""


def test_progress_is_for_terminals_only() -> None:
    assert "prefill" in on_terminal(sys.executable, "-c", PROGRESS)
    piped = children.run(sys.executable, "-c", PROGRESS)
    assert (piped.stdout, piped.stderr) == ("done\n", "")
