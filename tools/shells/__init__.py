"""Completion scripts for bash, zsh and fish, from the command tree. Stored names come from `amem __complete`.

The `.in` files are templates; the parts that depend on the tree replace their @WORDS@.
"""

from pathlib import Path

from tools.shells import bash, fish, zsh
from tools.tree import root

_FOLDER = Path(__file__).parent


def scripts() -> dict[str, str]:
    """The text of every completion script, by its file name."""
    tree = root()
    return {
        "amem.bash": _filled("bash.in", bash.parts(tree)),
        "_amem": _filled("zsh.in", zsh.parts(tree)),
        "amem.fish": _filled("fish.in", fish.parts(tree)),
    }


def _filled(template: str, parts: dict[str, str]) -> str:
    text = (_FOLDER / template).read_text("utf-8")
    for word, part in parts.items():
        text = text.replace(f"@{word}@", part)
    return text
