"""What the benchmarks share: how they are called, how they time, and how they tell, keep and draw what they found.

A result is a list of rows, one dict each with the same keys: the table that is printed, the JSON that is kept and the
picture are made of the same rows. What is compared runs in turn, again and again, since a machine's speed drifts.
"""

import json
import os
import platform
import statistics
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from amem_cli.engine.backend.blas import preload

RESULTS = Path(__file__).parent / "results"
PICTURES = Path(__file__).parent.parent / "docs" / "reference" / "benchmarks"

T = TypeVar("T")
Row = dict[str, str | int | float | None]
Draw = Callable[[Any, list[Row]], None]  # matplotlib's Axes, and the rows


def options(name: str, text: str) -> ArgumentParser:
    """A parser with the options that every benchmark has. `text` is the module's docstring."""
    parser = ArgumentParser(f"python -m benchmarks.{name}", description=text.partition("\n")[0])
    parser.add_argument("--json", type=Path, default=RESULTS / f"{name}.json", metavar="FILE", help="where rows go")
    parser.add_argument("--no-picture", action="store_true", help=f"do not draw docs/reference/benchmarks/{name}.svg")
    return parser


def seconds(run: Callable[[], T], after: Callable[[T], object] | None = None) -> float:
    """How long one call takes. `after` is given what it returned, the clock having been read."""
    started = time.perf_counter()
    result = run()
    elapsed = time.perf_counter() - started
    if after is not None:
        after(result)
    return elapsed


def interleaved(
    repeats: int, runs: Mapping[str, Callable[[], float]], before: Callable[[], None] | None = None
) -> dict[str, list[float]]:
    """Call all of `runs`, which return what they measured, in turn, `repeats` times, and `before` ahead of each."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            if before is not None:
                before()
            found[name].append(run())
    return found


def ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """The median of the ratios of what was measured side by side."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "blas": preload().name,
        **{package: version(package) for package in ("amem", "mlx", "mlx-lm", "numpy")},
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def finish(name: str, args: Namespace, rows: list[Row], draw: Draw) -> None:
    """Print the rows, keep them as JSON beside the machine and the settings, and draw them."""
    table = Table(title=f"benchmarks.{name}", title_justify="left")
    for column in rows[0]:
        table.add_column(column, justify="left" if isinstance(rows[0][column], str) else "right")
    for row in rows:
        table.add_row(*map(shown, row.values()))
    Console().print(table)
    document = {"benchmark": name, "machine": machine(), "settings": _settings(args), "rows": rows}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(document, indent=1) + "\n")
    if not args.no_picture:
        _picture(name, rows, draw)


def _settings(args: Namespace) -> dict[str, Any]:
    """The requested sizes and the models' names, without paths of files."""
    settings = {key: value for key, value in vars(args).items() if type(value) in (int, float, list)}
    models = getattr(args, "model", [])
    if models:
        settings["model"] = [Path(model).name for model in ([models] if isinstance(models, str) else models)]
    return settings


def shown(value: str | int | float | None) -> str:
    """A value as tables have it: three significant digits."""
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else value


def _picture(name: str, rows: list[Row], draw: Draw) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = name  # the same rows give the same file
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    draw(axes, rows)
    axes.spines[["top", "right"]].set_visible(False)
    PICTURES.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURES / f"{name}.svg", metadata={"Date": None})
    pyplot.close(figure)


def bars(axes: Any, names: Sequence[str], series: dict[str, list[float]]) -> None:
    """Grouped bars: for each of `names` one bar of every series, with its value on top."""
    width = 0.8 / len(series)
    for i, (label, values) in enumerate(series.items()):
        places = [at - 0.4 + width * (i + 0.5) for at in range(len(names))]
        axes.bar_label(axes.bar(places, values, width, label=label), fmt="%.3g", fontsize=8)
    axes.set_xticks(range(len(names)), names)
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=len(series), fontsize=8)
