"""The text that the demo's agents have read: the handbook of a lightship that never was."""

from importlib.resources import files
from itertools import cycle

FILE_NAME = "handbook.txt"
TOKENS = 1943  # of the whole text, for Gemma
_CHARACTERS_PER_TOKEN = 4.28


def handbook(tokens: int) -> str:
    """A text of about `tokens` tokens: whole paragraphs, repeated from the first if the text is too short."""
    whole = files("amem_cli.demo").joinpath(FILE_NAME).read_text("utf-8").strip()
    chosen: list[str] = []
    room = tokens * _CHARACTERS_PER_TOKEN
    for paragraph in cycle(whole.split("\n\n")):
        if room < len(paragraph) / 2:
            return "\n\n".join(chosen) + "\n"
        chosen.append(paragraph)
        room -= len(paragraph) + 2
    raise AssertionError("a cycle has no end")
