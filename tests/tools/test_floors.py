"""Who may print, read the environment or change the file system: read from the code."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STORE, ENGINE = ROOT / "kvstore", ROOT / "amem_cli" / "engine"
SHIPPED = [*sorted(STORE.rglob("*.py")), *sorted((ROOT / "amem_cli").rglob("*.py"))]

# Calls that change the file system, by what stands before the dot. Path methods are told by their names alone.
MUTATIONS = {
    "os": {
        *("chmod", "chown", "ftruncate", "link", "makedirs", "mkdir", "mkfifo", "posix_fallocate", "pwrite", "pwritev"),
        *("remove", "removedirs", "rename", "renames", "replace", "rmdir", "symlink", "truncate", "unlink", "utime"),
        *("write", "writev"),
    },
    "shutil": {"chown", "copy", "copy2", "copyfile", "copymode", "copytree", "make_archive", "move", "rmtree"},
    "tempfile": {"NamedTemporaryFile", "TemporaryDirectory", "TemporaryFile", "mkdtemp", "mkstemp"},
    "sqlite3": {"connect"},
    "mx": {"save", "save_gguf", "save_safetensors", "savez"},
    "np": {"memmap", "save", "savez", "savetxt"},
}
PATH_METHODS = {
    *("chmod", "hardlink_to", "mkdir", "rename", "rmdir", "symlink_to", "touch", "unlink", "write_bytes", "write_text"),
}
WRITING = set("wax+")
ALLOWED = {
    ("amem_cli/main.py", "os.open"): "the null device, for a stream that the process began without",
    ("amem_cli/main.py", "os.fdopen"): "the same",
    (
        "kvstore/commit/index.py",
        "sqlite3.connect",
    ): "SQLite writes its own file; the module announces each change to files",
    ("amem_cli/commands/demo.py", "tempfile.TemporaryDirectory"): "the demo's folder, of which nothing is to stay",
}


@dataclass(frozen=True)
class Module:
    path: Path
    tree: ast.Module

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    def imports(self) -> Iterator[str]:
        """Every imported module or name, dotted; inside of functions and for types only, too."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.name} has a relative import"
                yield from (f"{node.module}.{alias.name}" for alias in node.names)

    def calls(self) -> Iterator[tuple[str, str, ast.Call]]:
        """Every call as (what stands before the dot, what is called, the node)."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                if isinstance(node.func, ast.Attribute):
                    yield ast.unparse(node.func.value), node.func.attr, node
                elif isinstance(node.func, ast.Name):
                    yield "", node.func.id, node


def module(path: Path) -> Module:
    return Module(path, ast.parse(path.read_text("utf-8")))


def source(code: str) -> Module:
    return Module(ROOT / "kvstore" / "made_up.py", ast.parse(code))


def mutations(code: Module) -> list[str]:
    """The calls that change the file system."""
    changing = {f"{owner}.{name}" for owner, names in MUTATIONS.items() for name in names}
    found = [name for name in code.imports() if name in changing]  # from os import replace
    for owner, name, node in code.calls():
        opens = name in ("open", "fdopen") and (owner in ("", "io", "os") or _mode(node, 0))
        if name in MUTATIONS.get(owner, ()) or (owner not in ("files", "os", *MUTATIONS) and name in PATH_METHODS):
            found.append(f"{owner}.{name}")
        elif owner == "os" and name == "open":
            if any(flag in ast.unparse(node) for flag in ("O_CREAT", "O_RDWR", "O_WRONLY", "O_TRUNC")):
                found.append("os.open")
        elif opens and WRITING & set(_mode(node, 1 if owner in ("", "io", "os") else 0)):
            found.append(f"{owner}.{name}")
        elif name in ("replace", "move") and len(node.args) == 1 and not node.keywords and owner != "files":
            found.append(f"{owner}.{name}")  # str.replace has two arguments, Path.replace one
    return found


def _mode(node: ast.Call, place: int) -> str:
    """The mode of an `open`, as far as it is a constant."""
    given = [keyword.value for keyword in node.keywords if keyword.arg == "mode"] or node.args[place : place + 1]
    return str(given[0].value) if given and isinstance(given[0], ast.Constant) else ""


@pytest.mark.parametrize("floor", [STORE, ENGINE], ids=lambda floor: floor.name)
def test_a_floor_neither_prints_nor_reads_the_environment(floor: Path) -> None:
    for path in floor.rglob("*.py"):
        code = module(path)
        calls = {name if not owner else f"{owner}.{name}" for owner, name, _ in code.calls()}
        assert calls.isdisjoint({"print", "os.getenv", "os.putenv", "input"}), path
        attributes = {ast.unparse(node) for node in ast.walk(code.tree) if isinstance(node, ast.Attribute)}
        assert attributes.isdisjoint({"os.environ", "sys.stdout", "sys.stderr", "sys.stdin", "sys.argv"}), path


def test_every_change_of_the_file_system_is_in_one_module() -> None:
    found = {
        (code.name, call)
        for code in map(module, SHIPPED)
        if code.path != STORE / "disk" / "files.py"
        for call in mutations(code)
    }
    assert found - ALLOWED.keys() == set()
    assert ALLOWED.keys() - found == set(), "an exception that nobody needs"


@pytest.mark.parametrize(
    "code",
    [
        "open(path, 'w')",
        "open(path, mode='r+b')",
        "io.open(path, 'ab')",
        "path.open('x')",
        "path.open(mode='w')",
        "os.open(path, os.O_RDWR | os.O_CREAT)",
        "os.replace(a, b)",
        "os.unlink(a)",
        "path.unlink(missing_ok=True)",
        "path.parent.mkdir()",
        "path.write_text(text)",
        "path.replace(target)",
        "path.rename(target)",
        "shutil.rmtree(path)",
        "tempfile.mkdtemp()",
        "from os import replace",
    ],
)
def test_a_change_is_noticed(code: str) -> None:
    assert mutations(source(code))


@pytest.mark.parametrize(
    "code",
    [
        "open(path)",
        "path.open('rb')",
        "open(path, 'rb')",
        "os.open(path, os.O_RDONLY)",
        "text.replace('a', 'b')",
        "files.unlink(path)",
        "files.replace(a, b)",
        "shutil.disk_usage(path)",
        "parameter.replace(kind=kind)",
        "replace(manifest, op=op)",
        "store.open(path, actor)",
    ],
)
def test_reading_is_no_change(code: str) -> None:
    assert not mutations(source(code))
