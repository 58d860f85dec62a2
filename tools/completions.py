"""Completion for bash, zsh and fish, from the command tree. The names of what is stored come from `amem __complete`."""

from collections.abc import Iterator
from itertools import groupby

from tools.tree import Argument, Command, Option, root

_HEADER = "made by `python -m tools`"


def scripts() -> dict[str, str]:
    """The text of every completion script, by its file name."""
    tree = root()
    return {"amem.bash": _bash(tree), "_amem": _zsh(tree), "amem.fish": _fish(tree)}


def _path(command: Command) -> str:
    return " ".join(command.path)


def _flags(command: Command) -> list[str]:
    return [flag for option in (*command.options, *command.shared) for flag in option.flags]


def _valued(command: Command) -> list[Option]:
    """The options that take a value."""
    return [option for option in (*command.options, *command.shared) if option.metavar is not None]


def _quote(text: str) -> str:
    """For bash and zsh."""
    return "'" + text.replace("'", "'\\''") + "'"


_BASH = """\
# Completion of amem for bash (3.2 or later), {header}.

_amem() {{
    local cur='' word path='' value='' ended='' offered prefix
    local -a words=()
    local -i i place=0
    for ((i = 0; i <= COMP_CWORD; i++)); do # readline parts words at @, = and :
        word=${{COMP_WORDS[i]}}
        if ((i)) && [[ -n $word && ($word == [@=:]* || ${{COMP_WORDS[i - 1]}} == *[@=:]) ]]; then
            words[${{#words[@]}} - 1]+=$word
        else
            words+=("$word")
        fi
    done
    for ((i = 1; i < ${{#words[@]}} - 1; i++)); do
        word=${{words[i]}}
        if [[ -n $value ]]; then
            value=''
        elif [[ -z $ended && $word == -- ]]; then
            ended=yes
        elif [[ -z $ended && $word == -?* ]]; then
            [[ $word == *=* ]] || ! _amem_value "$path" "$word" >/dev/null || value=$word
        elif ((place == 0)) && _amem_options "${{path:+$path }}$word" >/dev/null; then
            path=${{path:+$path }}$word
        else
            place+=1
        fi
    done
    cur=${{words[${{#words[@]}} - 1]}}
    prefix=${{cur%"$2"}} # what readline leaves in place
    if [[ -n $value ]]; then
        offered=$(_amem_value "$path" "$value")
    elif [[ -z $ended && $cur == --*=* ]]; then
        offered=$(_amem_value "$path" "${{cur%%=*}}")
        prefix=${{prefix#*=}}
        cur=${{cur#*=}}
    elif [[ -z $ended && $cur == -* ]]; then
        offered="words $(_amem_options "$path")"
    else
        offered=$(_amem_argument "$path" "$place")
    fi
    _amem_offer
}}

# Fill COMPREPLY with what is offered and begins as the word does. Where nothing is found bash offers files itself.
_amem_offer() {{
    local candidate
    COMPREPLY=()
    [[ $offered == files ]] && return
    compopt +o default 2>/dev/null
    case $offered in
        folders) compopt -o dirnames 2>/dev/null; return ;;
        words*) offered=${{offered#words}} ;;
        names*) offered=$("${{words[0]}}" __complete "${{offered#names }}" "${{words[@]:1:${{#words[@]}}-2}}" "$cur" 2>/dev/null) ;;
    esac
    for candidate in $offered; do
        [[ $candidate == "$cur"* ]] && COMPREPLY+=("${{candidate#"$prefix"}}")
    done
}}

# What may follow the option $2 of the command $1; fails where it takes no value.
_amem_value() {{
    case "$1 $2" in
{values}
        *) return 1 ;;
    esac
}}

# What the command $1 takes at place $2, from 0.
_amem_argument() {{
    case "$1 $2" in
{arguments}
    esac
}}

# The options of the command $1; fails where there is no such command.
_amem_options() {{
    case $1 in
{options}
        *) return 1 ;;
    esac
}}

complete -o default -F _amem amem
"""


def _bash(tree: Command) -> str:
    values = {
        f"{_path(command)} {flag}": _offered(option) for command in tree.all() for option, flag in _pairs(command)
    }
    arguments = {
        f"{_quote(f'{_path(command)} ')}{place}": _offered(argument)
        for command in tree.all()
        for place, argument in _places(command)
    }
    arguments |= {
        f"{_quote(f'{_path(command)} ')}0": f"words {' '.join(below.path[-1] for below in command.commands)}"
        for command in tree.all()
        if command.commands
    }
    options = {_path(command): " ".join(_flags(command)) for command in tree.all()}
    return _BASH.format(
        header=_HEADER,
        values="\n".join(_cases({_quote(key): value for key, value in values.items()})),
        arguments="\n".join(_cases(arguments)),
        options="\n".join(_cases({_quote(key): value for key, value in options.items()})),
    )


def _pairs(command: Command) -> Iterator[tuple[Option, str]]:
    for option in _valued(command):
        yield from ((option, flag) for flag in option.flags)


def _places(command: Command) -> Iterator[tuple[str, Argument]]:
    """The patterns of the places, from 0, that a command's arguments stand at."""
    for place, argument in enumerate(command.arguments):
        yield ("*" if argument.many else str(place)), argument


def _offered(parameter: Option | Argument) -> str:
    if isinstance(parameter, Option) and parameter.choices:
        return f"words {' '.join(parameter.choices)}"
    return parameter.kind if parameter.kind in ("", "files", "folders") else f"names {parameter.kind}"


def _cases(cases: dict[str, str]) -> Iterator[str]:
    """The branches of a `case`; those that do the same are one."""
    by_action = sorted(cases.items(), key=lambda case: ("*" in case[0], case[1]))
    for (_, action), group in groupby(by_action, key=lambda case: ("*" in case[0], case[1])):
        patterns = " | ".join(pattern for pattern, _ in group)
        yield f"        {patterns}) echo {_quote(action)} ;;"


_ZSH = """\
#compdef amem
# Completion of amem for zsh, {header}.

_amem_names() {{
    local -a found
    found=(${{(f)"$($amem_command __complete $1 $amem_typed "$PREFIX" 2>/dev/null)"}})
    compadd -a found
}}

{functions}

local amem_command=$words[1]
local -a amem_typed=(${{(Q)words[2,CURRENT-1]}})
_amem "$@"
"""


def _zsh(tree: Command) -> str:
    functions = "\n\n".join(_zsh_function(command) for command in tree.all())
    return _ZSH.format(header=_HEADER, functions=functions)


def _zsh_function(command: Command) -> str:
    specs = [spec for option in (*command.options, *command.shared) for spec in _zsh_option(option)]
    if command.commands:
        specs += [_quote("1: :->command"), _quote("*:: :->rest")]
    specs += [_zsh_argument(place, argument) for place, argument in enumerate(command.arguments, start=1)]
    lines = [f"{_zsh_name(command)}() {{"]
    if command.commands:
        lines += ["    local curcontext=$curcontext state line", "    local -A opt_args"]
    lines.append("    _arguments -s -S " + ("-C " if command.commands else "") + "\\")
    lines += [f"        {spec} \\" for spec in specs[:-1]] + [f"        {specs[-1]}"]
    return "\n".join([*lines, *_zsh_below(command), "}"])


def _zsh_below(command: Command) -> Iterator[str]:
    """How a command hands over to the commands below it."""
    if not command.commands:
        return
    yield "    case $state in"
    yield "        command)"
    yield "            local -a commands=("
    for below in command.commands:
        yield f"                {_quote(f'{below.path[-1]}:{below.help}')}"
    yield "            )"
    yield "            _describe command commands ;;"
    yield "        rest)"
    yield "            case $line[1] in"
    for below in command.commands:
        yield f"                {below.path[-1]}) {_zsh_name(below)} ;;"
    yield "            esac ;;"
    yield "    esac"


def _zsh_name(command: Command) -> str:
    return "_".join(("_amem", *command.path))


def _zsh_option(option: Option) -> Iterator[str]:
    lead = "*" if option.multiple else f"({' '.join(option.flags)})" if len(option.flags) > 1 else ""
    text = option.help.replace("\\", "\\\\").replace("[", "\\[").replace("]", "\\]")
    value = "" if option.metavar is None else f":{option.metavar}:{_zsh_action(option)}"
    for flag in option.flags:
        is_long = flag.startswith("--")
        joint = "" if option.metavar is None else "=" if is_long else "+"
        yield _quote(f"{lead}{flag}{joint}[{text}]{value}")


def _zsh_argument(place: int, argument: Argument) -> str:
    number = "*" if argument.many else f"{place}{'' if argument.required else ':'}"
    separator = ":" if argument.many or argument.required else ""
    return _quote(f"{number}{separator}{argument.metavar}:{_zsh_action(argument)}")


def _zsh_action(parameter: Option | Argument) -> str:
    if isinstance(parameter, Option) and parameter.choices:
        return f"({' '.join(parameter.choices)})"
    return {"": " ", "files": "_files", "folders": "_files -/"}.get(parameter.kind, f"_amem_names {parameter.kind}")


_FISH = """\
# Completion of amem for fish, {header}.

set -g __amem_commands {commands}
set -g __amem_valued {valued}

# Which command stands on the line, and how many arguments after it: "model add 1".
function __amem_place
    set -l path
    set -l place 0
    set -l is_value no
    for word in (commandline -opc)[2..-1]
        if test $is_value = yes
            set is_value no
        else if string match -q -- '-*' $word
            contains -- "$path $word" $__amem_valued; and set is_value yes
        else if test $place = 0; and contains -- (string trim "$path $word") $__amem_commands
            set path (string trim "$path $word")
        else
            set place (math $place + 1)
        end
    end
    echo "$path $place"
end

function __amem_at
    string match -qr -- "^$argv\\$" (__amem_place)
end

function __amem_names
    set -l begun (string replace -r -- '^--[^=]*=' '' (commandline -ct))
    set -l words (commandline -opc)
    $words[1] __complete $argv $words[2..-1] "$begun" 2>/dev/null
end

complete -c amem -f
{lines}
"""


def _fish(tree: Command) -> str:
    commands = [_path(command) for command in tree.all() if command.path]
    valued = [f"{_path(command)} {flag}" for command in tree.all() for _, flag in _pairs(command)]
    lines = [line for command in tree.all() for line in _fish_lines(command)]
    return _FISH.format(
        header=_HEADER,
        commands=" ".join(map(_fish_quote, commands)),
        valued=" ".join(map(_fish_quote, valued)),
        lines="\n".join(lines),
    )


def _fish_lines(command: Command) -> Iterator[str]:
    path = _path(command)
    for below in command.commands:
        yield _fish_line(f"{path} 0", f"-a {below.path[-1]}", below.help)
    for place, argument in enumerate(command.arguments):
        action = _fish_action(argument)
        if action:
            yield _fish_line(f"{path} {_fish_places(place, argument)}", action, argument.help)
    for option in (*command.options, *command.shared):
        flags = " ".join(f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in option.flags)
        value = "" if option.metavar is None else f" -r {_fish_action(option) or '-f'}"
        yield _fish_line(f"{path} .*", flags + value, option.help)


def _fish_places(place: int, argument: Argument) -> str:
    if not argument.many:
        return str(place)
    return f"[{place}-9].*" if place else ".*"


def _fish_line(condition: str, what: str, text: str) -> str:
    return f"complete -c amem -n {_fish_quote(f'__amem_at {_fish_quote(condition)}')} {what} -d {_fish_quote(text)}"


def _fish_action(parameter: Option | Argument) -> str:
    if isinstance(parameter, Option) and parameter.choices:
        return f"-f -a {_fish_quote(' '.join(parameter.choices))}"
    if parameter.kind == "folders":
        return "-f -a '(__fish_complete_directories)'"
    return {"": "", "files": "-F"}.get(parameter.kind, f"-f -a '(__amem_names {parameter.kind})'")


def _fish_quote(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
