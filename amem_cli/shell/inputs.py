"""The text that users pass in: messages, files and standard input.

Standard input is read for `-`, or if there is no message and it is not a terminal. With a message it is never read,
so that a shell's `while read` loop keeps its input. Text is strict UTF-8, and one final newline is dropped.
"""

import errno
import sys
from collections.abc import Sequence
from pathlib import Path

from kvstore.errors import AmemError, NotFoundError, UsageError

STDIN = "-"


def interactive() -> bool:
    """Whether standard input is a terminal, so that no text is waiting in it."""
    return sys.stdin.isatty()


def prefill_text(files: Sequence[str]) -> str:
    """The files joined as `cat` joins them, or standard input if there are none and it is not a terminal.

    Raises UsageError, NotFoundError and AmemError as `read_text` does.
    """
    sources = files or ([] if interactive() else [STDIN])
    return drop_newline(cat(sources))


def chat_text(message: str | None, files: Sequence[str]) -> str:
    """The message, then the files after a blank line.

    Raises UsageError if both are empty, and as `read_text` does.
    """
    if message == STDIN or (message is None and not interactive()):
        message = read_text(STDIN)
    elif message is not None:
        check_text(message, "the message")
    parts = (drop_newline(message or ""), drop_newline(cat(files)))
    text = "\n\n".join(filter(None, parts))
    if not text:
        raise UsageError("the prompt is empty", "give a message, -f FILE or standard input")
    return text


def cat(sources: Sequence[str]) -> str:
    """The text of all sources, joined without a separator."""
    return "".join(map(read_text, sources))


def read_text(source: str) -> str:
    """A file's text, or standard input's for `-`.

    Raises NotFoundError for a missing file, UsageError for a folder or invalid UTF-8, AmemError if reading fails.
    """
    name = "standard input" if source == STDIN else source
    try:
        data = sys.stdin.buffer.read() if source == STDIN else Path(source).read_bytes()
    except FileNotFoundError as error:
        raise NotFoundError(f"no such file: {name}") from error
    except OSError as error:
        if error.errno == errno.EISDIR:
            raise UsageError(f"{name} is a folder", "name a file in it") from error
        raise AmemError(f"{name} cannot be read: {error.strerror}") from error
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not UTF-8: invalid byte at offset {error.start}") from error


def check_text(text: str, what: str) -> str:
    """Return `text`. Raises UsageError if the command line had bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{what} is not UTF-8") from error
    return text


def drop_newline(text: str) -> str:
    """`text` without the one newline that ends a file."""
    return text.removesuffix("\n")
