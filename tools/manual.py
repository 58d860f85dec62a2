"""The man pages: synopsis, options and exit codes from the code, the rest from the prose in tools/pages.

A prose file has the name of its command. Its first lines list the exit codes beside those of every command (`Exits:`)
and related pages (`See:`). Sections start with `# `. In a section, blank lines separate paragraphs, lines indented by
four spaces are literal, and `- term: text` is an entry of a list. `code` becomes bold, *names* become italic.
"""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from amem_cli import __version__
from kvstore import errors
from tools.tree import Argument, Command, Option, root

DATE = "2026-11-29"  # of this version, in the footer of each page
PAGES = Path(__file__).parent / "pages"
COMMON_CODES = {0, 1, 2, 4}  # success; a bug or I/O error; a bad option or config file; a missing config file
_SPECIAL = {"\\": "\\e", "-": "\\-", "'": "\\(aq", "`": "\\(ga", "~": "\\(ti", "^": "\\(ha"}
_ITEM = re.compile(r"- (.+?): (.+)", re.DOTALL)


def pages() -> dict[str, str]:
    """The text of every man page, by its file name."""
    tree = root()
    return {f"{name(command.path)}.1": _page(command, tree) for command in (tree, *tree.commands)}


def name(path: tuple[str, ...]) -> str:
    return "-".join(("amem", *path))


def escape(text: str) -> str:
    """`text` escaped for roff, in ASCII. A word that starts with a dot is not a request."""
    shown = "".join(_SPECIAL.get(c, c) if c.isascii() else f"\\[u{ord(c):04X}]" for c in text)
    return re.sub(r"(?<!\S)(?=\.)", r"\\&", shown)


def exit_codes(command: Command) -> dict[int, str]:
    """The exit codes of a command with their meanings. `amem` itself has all of them."""
    kinds: list[type[errors.AmemError]] = [errors.AmemError, *errors.AmemError.__subclasses__()]
    meanings = {0: "Success."} | {kind.exit_code: _first_line(kind) for kind in kinds}
    if not command.path:
        return meanings
    own = set(map(int, _listed(command, "Exits")))
    return {code: text for code, text in sorted(meanings.items()) if code in own | COMMON_CODES}


def _first_line(kind: type[errors.AmemError]) -> str:
    if kind is errors.AmemError:
        return "Failure: a bug, an I/O error, or an error of another program."
    return (kind.__doc__ or "").strip().partition("\n")[0]


def _listed(command: Command, what: str) -> list[str]:
    """The words of a header line of the prose."""
    match = re.search(rf"^{what}:(.*)$", _prose(command), re.MULTILINE)
    return match[1].split() if match else []


def _prose(command: Command) -> str:
    return (PAGES / f"{'-'.join(command.path) or 'amem'}.md").read_text("utf-8")


def _sections(command: Command) -> dict[str, str]:
    parts = re.split(r"^# (.+)\n", _prose(command), flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def _page(command: Command, tree: Command) -> str:
    prose = _sections(command)
    examples = prose.pop("EXAMPLES")
    sections = {"NAME": _title(command), "SYNOPSIS": _synopsis(command)}
    sections |= {title: _text(text) for title, text in prose.items()}
    sections |= {"OPTIONS": _options(command)}
    sections |= {} if command.path else {"COMMANDS": _commands(command)}
    sections |= {"EXIT STATUS": _exit_status(command), "EXAMPLES": _text(examples)}
    sections |= {"SEE ALSO": _see_also(command, tree)}
    lines = [f'.TH {name(command.path).upper()} 1 "{DATE}" "amem {__version__}" "amem manual"']
    for title, text in sections.items():
        lines += [f".SH {title}", *text]
    return "\n".join(lines) + "\n"


def _title(command: Command) -> Iterator[str]:
    what = command.help.removesuffix(".")
    yield from _fill(f"{escape(name(command.path))} \\- {escape(what[:1].lower() + what[1:])}")


def _synopsis(command: Command) -> Iterator[str]:
    called = [command] if command.path == () or not command.commands else command.commands
    for place, one in enumerate(called):
        if place:
            yield ".br"
        words = [f"\\fB{escape(' '.join(('amem', *one.path)))}\\fP", "[\\fIOPTIONS\\fP]"]
        words += ["\\fICOMMAND\\fP [\\fIARGUMENT\\fP...]"] if not one.path else []
        words += [_inline(f"*{argument.shown}*") for argument in one.arguments]
        yield " ".join(words)


def _commands(command: Command) -> Iterator[str]:
    for below in command.commands:
        yield from (".TP", _page_name(name(below.path)), *_fill(escape(below.help)))


def _options(command: Command) -> Iterator[str]:
    if not command.commands:
        yield from _entries(command)
    for below in command.commands if command.path else ():
        yield from (f".SS amem {' '.join(below.path)}", *_text(below.help), *_entries(below))
    if command.path:
        yield from ([".PP"] if command.arguments or command.options or command.commands else [])
        yield "Options shared by all commands are described in"
        yield _page_name("amem") + "."
        return
    yield "All commands accept these, before and after the name of the command."
    for option in (*command.shared, *command.options):
        yield from _option(option)


def _entries(command: Command) -> Iterator[str]:
    for argument in command.arguments:
        yield from _argument(argument)
    for option in command.options:
        yield from _option(option)


def _argument(argument: Argument) -> Iterator[str]:
    yield ".TP"
    yield _inline(f"*{argument.shown}*")
    yield from _fill(escape(argument.help))


def _option(option: Option) -> Iterator[str]:
    flags = ", ".join(f"\\fB{escape(flag)}\\fP" for flag in option.flags)
    yield ".TP"
    yield flags if option.metavar is None else f"{flags} {_inline(f'*{option.metavar}*')}"
    notes = [option.help]
    notes += ["Can be repeated."] if option.multiple else []
    notes += [f"Default: {option.default}."] if option.default is not None else []
    notes += [f"Variable: {option.variable}."] if option.variable else []
    yield from _fill(escape(" ".join(notes)))


def _exit_status(command: Command) -> Iterator[str]:
    for code, meaning in sorted(exit_codes(command).items()):
        yield from (".TP", f".B {code}", *_fill(escape(meaning)))
    yield from (".TP", ".BI 128+ N", "Died of signal \\fIN\\fP; the output up to then is committed.")
    if not command.path:
        yield from (".PP", "If several apply, isolation takes precedence, then damage.")


def _see_also(command: Command, tree: Command) -> Iterator[str]:
    listed = _listed(command, "See") if command.path else [name(other.path)[5:] for other in tree.commands]
    others = [*(["amem"] if command.path else []), *(f"amem-{other}" for other in sorted(listed))]
    for place, other in enumerate(others):
        yield _page_name(other) + ("," if place + 1 < len(others) else "")


def _page_name(page: str) -> str:
    return f"\\fB{escape(page)}\\fP(1)"


def _text(text: str) -> Iterator[str]:
    """Paragraphs, lists and literal lines as roff."""
    for place, paragraph in enumerate(re.split(r"\n\s*\n", text.strip("\n"))):
        if paragraph.startswith("    "):
            yield from ([".PP"] if place else [])
            yield from (".nf", ".RS 4", *(escape(line[4:]) for line in paragraph.splitlines()), ".RE", ".fi")
        elif paragraph.startswith("- "):
            for item in re.split(r"\n(?=- )", paragraph):
                match = _ITEM.fullmatch(item)
                if match is None:
                    raise ValueError(f"list entry needs a term: {item}")
                yield from (".TP", _inline(match[1]), *_fill(_inline(match[2])))
        else:
            yield from ([".PP"] if place else [])
            yield from _fill(_inline(paragraph))


def _fill(roff: str) -> list[str]:
    """Roff text wrapped to the line length that mandoc accepts."""
    return textwrap.wrap(roff, 79, break_long_words=False, break_on_hyphens=False)


def _inline(text: str) -> str:
    """`bold` and *italic* as roff fonts, everything else escaped."""
    parts = re.split(r"(`[^`]+`|\*[^*]+\*)", text)
    fonts = {"`": "\\fB", "*": "\\fI"}
    return "".join(
        f"{fonts[part[0]]}{escape(part[1:-1])}\\fP" if part[:1] in fonts and len(part) > 2 else escape(part)
        for part in parts
    )
