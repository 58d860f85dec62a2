"""Update the tables of docs/reference/benchmarks.md from benchmarks/results: `python -m benchmarks.docs`."""

import json
import re
from pathlib import Path

from benchmarks.report import PICTURES, RESULTS, shown

PAGE = PICTURES.parent / "benchmarks.md"
_TABLE = re.compile(r"<!-- table: (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def table(results: Path) -> str:
    """The machine and the rows of one benchmark, in Markdown."""
    document = json.loads(results.read_text())
    machine, rows = document["machine"], document["rows"]
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(map(shown, row.values())) for row in rows)]
    sizes = ", ".join(f"{key} {value}" for key, value in document["settings"].items())
    where = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 1e9:.0f} GB, {machine['blas']}"
    versions = f"mlx {machine['mlx']}, mlx-lm {machine['mlx-lm']}, amem {machine['amem']}"
    return "\n".join([*(f"| {' | '.join(cells)} |" for cells in lines), "", f"{where}; {versions}; {sizes}."])


def filled(page: str) -> str:
    """The page with every table made anew; one without results stays empty."""

    def fill(found: re.Match[str]) -> str:
        results = RESULTS / f"{found[1]}.json"
        body = table(results) if results.exists() else "Not measured yet."
        return f"<!-- table: {found[1]} -->\n{body}\n<!-- end -->"

    return _TABLE.sub(fill, page)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
