"""A tree of Python modules as it is written: what each one is called, imports and defines. Nothing is imported."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

COMPUTED = "<computed>"
"""The target of an import whose name cannot be read from the code."""

_IMPORTERS = {"import_module", "__import__"}


@dataclass(frozen=True)
class Module:
    """A module: `path` from the root, with slashes; `name` with dots, which for an `__init__` is its package's."""

    path: str
    name: str
    lines: int
    tree: ast.Module

    @property
    def package(self) -> str:
        """The package that a relative import starts from."""
        return self.name if self.path.endswith("__init__.py") else self.name.rpartition(".")[0]


@dataclass(frozen=True)
class Import:
    """An import of `target`, a dotted name, in that line."""

    target: str
    line: int


def read(root: Path, folders: tuple[str, ...]) -> list[Module]:
    """Every module in `folders` of `root`, sorted by path. A folder that does not exist has none."""
    return [_module(root, path) for name in folders for path in sorted((root / name).rglob("*.py"))]


def _module(root: Path, path: Path) -> Module:
    text = path.read_text("utf-8")
    place = path.relative_to(root)
    parts = place.parent.parts if place.name == "__init__.py" else place.with_suffix("").parts
    return Module(place.as_posix(), ".".join(parts), len(text.splitlines()), ast.parse(text))


def imports(module: Module, known: Mapping[str, Module]) -> Iterator[Import]:
    """Every import in `module`, those in functions, under TYPE_CHECKING and by `import_module` too.

    `from a import b` is an import of a.b where `known` has that module, and of a otherwise.
    """
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (Import(target, node.lineno) for target in sorted(_targets(module, node, known)))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in _IMPORTERS:
            yield Import(_text(node.args[0], module, known) if node.args else COMPUTED, node.lineno)


def _targets(module: Module, node: ast.ImportFrom, known: Mapping[str, Module]) -> set[str]:
    """The modules that a `from` import names."""
    base = _base(module, node)
    names = [f"{base}.{alias.name}" for alias in node.names]
    return {name if name in known else base for name in names}


def _base(module: Module, node: ast.ImportFrom) -> str:
    """The name after `from`, with the dots of a relative import resolved."""
    if not node.level:
        return node.module or ""
    parts = module.package.split(".")
    parts = parts[: len(parts) - node.level + 1]
    return ".".join([*parts, node.module] if node.module else parts)


def _text(value: ast.expr, module: Module, known: Mapping[str, Module]) -> str:
    """The name that a call of `import_module` gets: a literal, a constant, or the packages an f-string begins with."""
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return value.value
    if isinstance(value, ast.JoinedStr) and value.values and isinstance(value.values[0], ast.Constant):
        return str(value.values[0].value).rpartition(".")[0] or COMPUTED
    return _constant(value.id, module, known) if isinstance(value, ast.Name) else COMPUTED


def _constant(name: str, module: Module, known: Mapping[str, Module]) -> str:
    """The string that `name` is set to at the top of `module`, or of the module that it is imported from."""
    for node in module.tree.body:
        if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names):
            origin = known.get(_base(module, node))
            return _constant(name, origin, known) if origin and origin is not module else COMPUTED
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return str(node.value.value) if isinstance(node.value, ast.Constant) else COMPUTED
    return COMPUTED


def definitions(node: ast.AST, outer: str = "") -> Iterator[tuple[str, Definition]]:
    """Every class, function and method under `node`, nested ones too, each with its qualified name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition):
            yield f"{outer}{child.name}", child
            yield from definitions(child, f"{outer}{child.name}.")
        else:
            yield from definitions(child, outer)


def strings(node: ast.AST, is_key: bool = False) -> Iterator[tuple[ast.Constant, bool]]:
    """Every string literal under `node`, and whether it is a key: of a dict that is spelled out, or in a subscript.

    Strings that are statements are documentation, and the text of an f-string is a message: neither counts.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node, is_key
    keys = _keys(node)
    for child in ast.iter_child_nodes(node):
        documents = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
        if not documents and not (isinstance(node, ast.JoinedStr) and isinstance(child, ast.Constant)):
            yield from strings(child, child in keys)


def _keys(node: ast.AST) -> list[ast.expr | None]:
    """What `node` has as keys. The choices of a `Literal[...]` are none."""
    if isinstance(node, ast.Subscript) and ast.unparse(node.value).rpartition(".")[2] != "Literal":
        return [node.slice]
    return node.keys if isinstance(node, ast.Dict) else []


def components(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The cycles of a graph: its strongly connected components of two or more, and nodes that point at themselves."""
    reach = {node: _reachable(graph, node) for node in graph}
    groups = {frozenset(other for other in reach[node] if node in reach.get(other, ())) for node in graph}
    return sorted(sorted(group) for group in groups if group)


def _reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    """Every node reachable from `start` over one or more edges."""
    found: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += graph.get(node, ())
    return found
