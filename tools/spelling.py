"""Where code spells out a kind of stored object, its folder or its suffix, instead of naming a constant."""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from tools.source import Module, strings

WORDS = {"block", "tail", "page", "manifest", "safetensors"}
FOLDERS = {"blocks", "tails", "pages", "manifests"}
DOMAIN_FILE, SUFFIX = "domain.json", ".safetensors"
STRIPPING = {"rstrip('s')", "removesuffix('s')"}


@dataclass(frozen=True)
class Exemption:
    """A literal that a module or folder may hold; with `key`, only as a key of a dict or subscript."""

    under: str
    literal: str
    key: bool
    reason: str


@dataclass(frozen=True)
class Literal:
    """A string that spells an object kind, or a call that makes one; `exemption` is what allows it."""

    place: str
    text: str
    exemption: Exemption | None = None


def literals(modules: Sequence[Module], exemptions: Sequence[Exemption]) -> list[Literal]:
    """Every literal of that sort, those with an exemption too."""
    return [found for module in modules for found in (*_spelled(module, exemptions), *_stripped(module))]


def _spelled(module: Module, exemptions: Sequence[Exemption]) -> Iterator[Literal]:
    """The strings of one module."""
    for node, is_key in strings(module.tree):
        text = str(node.value)
        if spells_kind(text):
            fits = (e for e in exemptions if e.literal == text and PurePosixPath(module.path).is_relative_to(e.under))
            exemption = next((e for e in fits if is_key or not e.key), None)
            yield Literal(f"{module.path}:{node.lineno}", repr(text), exemption)


def _stripped(module: Module) -> Iterator[Literal]:
    """The calls in one module that make the name of a kind from the name of its folder."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            text = f"{node.func.attr}({', '.join(map(ast.unparse, node.args))})"
            if text in STRIPPING:
                yield Literal(f"{module.path}:{node.lineno}", f".{text}")


def spells_kind(text: str) -> bool:
    """Whether `text` is one of the words, or a path or pattern with one. A sentence that contains one is not."""
    parts = text.split("/")
    if any(character.isspace() for character in text):
        return False
    return text in WORDS or not FOLDERS.isdisjoint(parts) or parts[-1] == DOMAIN_FILE or text.endswith(SUFFIX)
