"""Compare the imports of a tree with a table of layers."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from tools.source import Module, imports

ABOVE, BESIDE, UNPLACED, UNLISTED = "above", "beside", "unplaced", "unlisted"
"""Why an import is wrong: its layer is higher, it is a stranger in the same layer, it has no layer, or it is a package
that the area does not list."""


@dataclass(frozen=True)
class Area:
    """A package, the layers of its direct members from the bottom up, and the packages that it may import.

    In one layer, "a, b" may import each other and "a | b" may not. "*" is everything else in the package, each apart
    from the rest. The package's own `__init__` is below all layers, unless a layer names it.
    """

    name: str
    layers: tuple[str, ...]
    packages: tuple[str, ...]

    def holds(self, module: str) -> bool:
        """Whether `module` is the package, or in it."""
        return module == self.name or module.startswith(f"{self.name}.")

    def place(self, module: str) -> tuple[int, str] | None:
        """The number of the layer that `module` is in, and its group: one group's modules may import each other."""
        name = module.removeprefix(self.name).strip(".").partition(".")[0] or "__init__"
        for number, layer in enumerate(self.layers):
            for group in layer.split("|"):
                if name in group.replace(",", " ").split():
                    return number, group.strip()
        if name == "__init__":
            return -1, name
        return (self.layers.index("*"), name) if "*" in self.layers else None

    def clash(self, source: str, target: str) -> str:
        """Why `source` may not import `target`, both in the area; "" if it may, or if `source` has no layer."""
        here, there = self.place(source), self.place(target)
        if there is None:
            return UNPLACED
        if here is None or here == there or there[0] < here[0]:
            return ""
        return BESIDE if here[0] == there[0] else ABOVE


@dataclass(frozen=True)
class Breach:
    """An import of `target` that the table does not allow; `place` is the file and line, `why` one of the words."""

    place: str
    source: str
    target: str
    why: str


def breaches(modules: Sequence[Module], areas: Sequence[Area]) -> list[Breach]:
    """Every import in the areas that they do not allow."""
    known = {module.name: module for module in modules}
    return [
        Breach(f"{module.path}:{found.line}", module.name, found.target, why)
        for module in modules
        for found in imports(module, known)
        if (why := forbidden(module.name, found.target, areas))
    ]


def forbidden(source: str, target: str, areas: Sequence[Area]) -> str:
    """Why the module `source` may not import `target`; "" if it may, or if `source` is in no area."""
    around = [area for area in areas if area.holds(source)]
    shared = [area for area in around if area.holds(target)]
    if shared or not around:
        return next(filter(None, (area.clash(source, target) for area in shared)), "")
    innermost = max(around, key=lambda area: len(area.name))
    package = target.partition(".")[0]
    return "" if package in sys.stdlib_module_names or package in innermost.packages else UNLISTED


def unplaced(modules: Sequence[Module], areas: Sequence[Area]) -> list[tuple[Module, Area]]:
    """Every module of an area that is in none of its layers."""
    inside = [(module, area) for module in modules for area in areas if area.holds(module.name)]
    return [(module, area) for module, area in inside if area.place(module.name) is None]
