"""The `complete` lines of the completion for fish."""

from collections.abc import Iterator

from tools.tree import Argument, Command, Option


def parts(tree: Command) -> dict[str, str]:
    """The parts of fish.in."""
    valued = [f"{c.name} {flag}" for c in tree.all() for option in c.valued for flag in option.flags]
    return {
        "COMMANDS": " ".join(_quote(command.name) for command in tree.all() if command.path),
        "VALUED": " ".join(map(_quote, valued)),
        "LINES": "\n".join(line for command in tree.all() for line in _lines(command)),
    }


def _lines(command: Command) -> Iterator[str]:
    for below in command.commands:
        yield _line(f"{command.name} 0", f"-a {below.path[-1]}", below.help)
    for place, argument in enumerate(command.arguments):
        if action := _action(argument):
            places = f"[{place}-9].*" if argument.many else str(place)
            yield _line(f"{command.name} {places}", action, argument.help)
    for option in command.all_options:
        flags = " ".join(f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in option.flags)
        value = "" if option.metavar is None else f" -r {_action(option) or '-f'}"
        yield _line(f"{command.name} .*", flags + value, option.help)


def _line(place: str, what: str, text: str) -> str:
    """`place` is a pattern for the output of __amem_place."""
    return f"complete -c amem -n {_quote(f'__amem_at {_quote(place)}')} {what} -d {_quote(text)}"


def _action(parameter: Option | Argument) -> str:
    if isinstance(parameter, Option) and parameter.choices:
        return f"-f -a {_quote(' '.join(parameter.choices))}"
    if parameter.kind == "folders":
        return "-f -a '(__fish_complete_directories)'"
    return {"": "", "files": "-F"}.get(parameter.kind, f"-f -a '(__amem_names {parameter.kind})'")


def _quote(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
