"""The functions of the completion for zsh, one per command."""

from collections.abc import Iterator

from tools.tree import Argument, Command, Option


def parts(tree: Command) -> dict[str, str]:
    """The parts of zsh.in."""
    return {"FUNCTIONS": "\n\n".join("\n".join(_function(command)) for command in tree.all())}


def _function(command: Command) -> Iterator[str]:
    specs = [spec for option in command.all_options for spec in _option(option)]
    specs += [_argument(place, argument) for place, argument in enumerate(command.arguments, start=1)]
    yield f"{_function_name(command)}() {{"
    if command.commands:
        specs += ["'1: :->command'", "'*:: :->rest'"]
        yield "    local curcontext=$curcontext state line"
        yield "    local -A opt_args"
    yield f"    _arguments -s -S {'-C ' if command.commands else ''}\\"
    yield " \\\n".join(f"        {spec}" for spec in specs)
    yield from _below(command)
    yield "}"


def _below(command: Command) -> Iterator[str]:
    """How a command dispatches to its subcommands."""
    if not command.commands:
        return
    yield "    case $state in"
    yield "        command)"
    yield "            local -a commands=("
    yield from (f"                {_quote(f'{below.path[-1]}:{below.help}')}" for below in command.commands)
    yield "            )"
    yield "            _describe command commands ;;"
    yield "        rest)"
    yield "            case $line[1] in"
    yield from (f"                {below.path[-1]}) {_function_name(below)} ;;" for below in command.commands)
    yield "            esac ;;"
    yield "    esac"


def _function_name(command: Command) -> str:
    return "_".join(("_amem", *(command.path or ("root",))))


def _option(option: Option) -> Iterator[str]:
    """One spec per flag: `--long=` accepts a value after the sign, `-s+` in the same word."""
    lead = "*" if option.multiple else f"({' '.join(option.flags)})" if len(option.flags) > 1 else ""
    text = option.help.replace("\\", "\\\\").replace("[", "\\[").replace("]", "\\]")
    value = "" if option.metavar is None else f":{option.metavar}:{_action(option)}"
    for flag in option.flags:
        joint = "" if option.metavar is None else "=" if flag.startswith("--") else "+"
        yield _quote(f"{lead}{flag}{joint}[{text}]{value}")


def _argument(place: int, argument: Argument) -> str:
    lead = "*" if argument.many else str(place) if argument.required else f"{place}:"
    return _quote(f"{lead}:{argument.metavar}:{_action(argument)}")


def _action(parameter: Option | Argument) -> str:
    if isinstance(parameter, Option) and parameter.choices:
        return f"({' '.join(parameter.choices)})"
    return {"": " ", "files": "_files", "folders": "_files -/"}.get(parameter.kind, f"_amem_names {parameter.kind}")


def _quote(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
