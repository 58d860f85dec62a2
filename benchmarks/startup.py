"""What it costs to start: commands that load no model, over a Python that imports what any such tool needs.

The store holds two agents, as `benchmarks.store` makes them. Every command is a process of its own.
"""

import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.report import Row, bars, finish, interleaved, options, ratio, seconds
from benchmarks.store import Maker

_REFERENCE = "import typer, rich.console, rich.table"
COMMANDS = {"--help": ("--help",), "inspect": ("inspect",), "log": ("log",)}


def _process(arguments: tuple[str, ...], environment: dict[str, str]) -> float:
    command = [sys.executable, *arguments]
    return seconds(partial(subprocess.run, command, check=True, stdout=subprocess.DEVNULL, env=environment))


def measure(root: Path, repeats: int) -> list[Row]:
    """Each command's wall clock beside the reference's, in turn."""
    maker = Maker(root)
    for _ in range(2):
        maker.add_agent()
    environment = {**os.environ, "AMEM_STORE": str(root)}
    runs = {
        "reference": partial(_process, ("-c", _REFERENCE), environment),
        **{name: partial(_process, ("-m", "amem_cli", *words), environment) for name, words in COMMANDS.items()},
    }
    found = interleaved(repeats, runs)
    return [
        {
            "command": f"amem {name}",
            "ms": 1000 * sorted(found[name])[repeats // 2],
            "over": ratio(found[name], found["reference"]),
        }
        for name in COMMANDS
    ]


def draw(axes: Any, rows: list[Row]) -> None:
    bars(axes, [str(row["command"]) for row in rows], {"over the reference": [float(row["over"] or 0) for row in rows]})
    axes.axhline(1.5, color="grey", linestyle="--", linewidth=1)
    axes.set(ylabel="wall clock over the reference")


def main() -> None:
    parser = options("startup", __doc__ or "")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder) / "store", args.repeats)
    finish("startup", args, rows, draw)


if __name__ == "__main__":
    main()
