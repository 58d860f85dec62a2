"""The project's own files: what must not stand in them, and the packages that they need."""

import ast
import re
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Parts are joined here, so that this file does not hold what it looks for.
STRANGERS = [rf"(?<![\w.~}}])/{name}/" for name in ("work", "root", "home")]
STRANGERS += [re.escape(f"{name}.{end}") for name, end in (("pypi", "org"), ("pythonhosted", "org"), ("shields", "io"))]


def project_files() -> list[Path]:
    """Every text file that belongs to the project: what git tracks, and what it would."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    return [path for path in paths if path.is_file() and path.suffix not in (".png", ".safetensors", ".gguf", ".xz")]


@pytest.mark.parametrize("pattern", STRANGERS)
def test_no_file_knows_one_machine_or_a_registry(pattern: str) -> None:
    found = [path for path in project_files() if re.search(pattern, path.read_text("utf-8"))]
    assert not found


def declared() -> set[str]:
    """The names of all requirements in pyproject.toml, extras in brackets included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    extras = project["project"]["optional-dependencies"]
    wanted = [*project["build-system"]["requires"], *project["project"]["dependencies"], *chain(*extras.values())]
    names = set()
    for requirement in wanted:
        match = re.match(r"[\w.-]+(\[\w+\])?", requirement)
        assert match
        names.add(match[0])
    return names


def imported() -> set[str]:
    """The packages that the shipped code imports, but for its own and the standard library's."""
    found = set()
    for path in chain((ROOT / "kvstore").rglob("*.py"), (ROOT / "amem_cli").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add((node.module or "").partition(".")[0])
    return found - sys.stdlib_module_names - {"kvstore", "amem_cli"}


def explained() -> set[str]:
    """The names in the first column of docs/reference/dependencies.md, up to what was turned down."""
    page = (ROOT / "docs" / "reference" / "dependencies.md").read_text("utf-8").partition("## Turned down")[0]
    cells = re.findall(r"^\| ([^|]+) \|", page, re.MULTILINE)
    return {name for cell in cells for name in cell.split(", ")} - {"name", "---"}


def test_every_dependency_has_its_reason() -> None:
    assert declared() == explained()


def test_every_import_has_its_reason() -> None:
    page = (ROOT / "docs" / "reference" / "dependencies.md").read_text("utf-8").partition("## To develop")[0]
    assert "mlx" in imported()
    assert {name for name in imported() if not re.search(rf"\b{name.replace('_', '[-_]')}\b", page)} == set()


def test_the_bounds_on_the_page_are_those_of_the_project() -> None:
    page = (ROOT / "docs" / "reference" / "dependencies.md").read_text("utf-8")
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    rows = re.findall(r"^\| ([\w-]+) \|(?: \w+ \|)? ([<>=][^|]*) \|", page, re.MULTILINE)
    assert len(rows) > 10
    for name, bounds in rows:
        assert re.search(rf'"{re.escape(name)}{re.escape(bounds)}["; ]', project), f"{name} is not {bounds}"
