"""The `case` branches of the completion for bash."""

from collections.abc import Iterator
from itertools import groupby
from shlex import quote

from tools.tree import Argument, Command, Option


def parts(tree: Command) -> dict[str, str]:
    """The parts of bash.in."""
    commands = list(tree.all())
    values = {quote(f"{c.name} {flag}"): _offered(o) for c in commands for o in c.valued for flag in o.flags}
    options = {quote(c.name): " ".join(flag for o in c.all_options for flag in o.flags) for c in commands}
    arguments = {f"{quote(f'{c.name} ')}{place}": what for c in commands for place, what in _places(c)}
    return {"VALUES": _cases(values), "ARGUMENTS": _cases(arguments), "OPTIONS": _cases(options)}


def _places(command: Command) -> Iterator[tuple[str, str]]:
    """For each argument position from 0: a pattern, and what is completed there."""
    if command.commands:
        yield "0", f"words {' '.join(below.path[-1] for below in command.commands)}"
    for place, argument in enumerate(command.arguments):
        yield ("*" if argument.many else str(place)), _offered(argument)


def _offered(parameter: Option | Argument) -> str:
    if isinstance(parameter, Option) and parameter.choices:
        return f"words {' '.join(parameter.choices)}"
    return parameter.kind if parameter.kind in ("", "files", "folders") else f"names {parameter.kind}"


def _cases(cases: dict[str, str]) -> str:
    """Branches; those with the same action are merged, and patterns for any position come last."""

    def order(case: tuple[str, str]) -> tuple[bool, str]:
        return case[0].endswith("*"), case[1]

    branches = []
    for (_, action), group in groupby(sorted(cases.items(), key=order), key=order):
        branches.append(f"        {' | '.join(pattern for pattern, _ in group)}) echo {quote(action)} ;;")
    return "\n".join(branches)
