"""The commands as data, read from the parser that runs them. Man pages and completions are generated from it."""

from collections.abc import Iterator
from dataclasses import dataclass

from typer._click.core import Command as ClickCommand
from typer._click.core import Context
from typer.core import TyperArgument, TyperGroup, TyperOption
from typer.main import get_command

from amem_cli import main
from amem_cli.shell.config import SHARED_KEYS
from kvstore.format.codecs import CODECS

# What shells complete for a value, by the first word of its metavar.
KINDS = {
    "AGENT": "agents",
    "REF": "refs",
    "A": "refs",
    "B": "refs",
    "MODEL": "models",
    "D": "domains",
    "DOMAIN": "domains",
    "FILE": "files",
    "SOURCE": "files",
    "DIR": "folders",
}
CHOICES = {"CODEC": tuple(CODECS), "FORMAT": ("amem", "mlx-lm")}
FREE = {
    *("AGE", "CODEC", "DIGEST", "LABEL", "MESSAGE", "N", "NAME", "NEW", "P", "SECONDS", "SIZE", "T", "TEXT", "TIME"),
    "FORMAT",
}
"""Metavars of values that no shell can complete."""


def kind_of(metavar: str) -> str:
    """One of the values of `KINDS`, or "". Raises KeyError for a metavar in neither `KINDS` nor `FREE`."""
    first = metavar.partition("|")[0].removesuffix("…")
    return "" if first in FREE else KINDS[first]


@dataclass(frozen=True)
class Option:
    """An option. `flags` are as typed; `metavar` is None for a switch."""

    flags: tuple[str, ...]
    metavar: str | None
    choices: tuple[str, ...]
    multiple: bool
    help: str
    default: str | None
    variable: str | None

    @property
    def kind(self) -> str:
        return "" if self.choices or self.metavar is None else kind_of(self.metavar)


@dataclass(frozen=True)
class Argument:
    metavar: str
    required: bool
    many: bool
    help: str

    @property
    def kind(self) -> str:
        return kind_of(self.metavar)

    @property
    def shown(self) -> str:
        """As in a usage line."""
        text = self.metavar.removesuffix("…") + ("..." if self.many else "")
        return text if self.required else f"[{text}]"


@dataclass(frozen=True)
class Command:
    """A command and its subcommands. `path` has its words, () for `amem` itself; `shared` are the options of all."""

    path: tuple[str, ...]
    help: str
    arguments: tuple[Argument, ...]
    options: tuple[Option, ...]
    shared: tuple[Option, ...]
    commands: tuple["Command", ...]

    @property
    def name(self) -> str:
        """The words of the command, without `amem`."""
        return " ".join(self.path)

    @property
    def all_options(self) -> tuple[Option, ...]:
        return self.options + self.shared

    @property
    def valued(self) -> list[Option]:
        """The options that take a value."""
        return [option for option in self.all_options if option.metavar is not None]

    def all(self) -> Iterator["Command"]:
        """This command and all its subcommands."""
        yield self
        for command in self.commands:
            yield from command.all()


def root() -> Command:
    """`amem` with all its commands, in the order of `amem --help`."""
    group = get_command(main.root_app())
    ctx = Context(group, info_name="amem", **group.context_settings)
    commands = []
    for name, text in main.COMMANDS.items():
        commands.append(_read(main.load_command(name), (name,), ctx, text))
    return _command(group, (), ctx, group.help or "", tuple(commands))


def _read(command: ClickCommand, path: tuple[str, ...], parent: Context, text: str | None = None) -> Command:
    ctx = Context(command, info_name=path[-1], parent=parent, **command.context_settings)
    below: tuple[Command, ...] = ()
    if isinstance(command, TyperGroup):
        below = tuple(_read(inner, (*path, name), ctx) for name, inner in command.commands.items())
    return _command(command, path, ctx, text or command.help or "", below)


def _command(
    command: ClickCommand, path: tuple[str, ...], ctx: Context, text: str, below: tuple[Command, ...]
) -> Command:
    found = [_option(parameter, ctx) for parameter in command.get_params(ctx) if isinstance(parameter, TyperOption)]
    shared = {f"--{key.replace('_', '-')}" for key in SHARED_KEYS} | {"--help"}
    return Command(
        path=path,
        help=text,
        arguments=tuple(_argument(p) for p in command.params if isinstance(p, TyperArgument)),
        options=tuple(option for option in found if not shared.intersection(option.flags)),
        shared=tuple(option for option in found if shared.intersection(option.flags)),
        commands=below,
    )


def _option(option: TyperOption, ctx: Context) -> Option:
    listed = tuple(map(str, option.type_descriptor.choices or ()))
    return Option(
        flags=tuple(sorted(option.opts, key=lambda flag: flag.startswith("--"))),
        metavar=None if option.is_flag else option.metavar or "|".join(listed) or "TEXT",
        choices=listed or CHOICES.get(option.metavar or "", ()),
        multiple=option.multiple,
        help=option.help or "",
        default=None if option.is_flag or option.default is None else f"{option.default}",
        variable=_variable(option, ctx),
    )


def _variable(option: TyperOption, ctx: Context) -> str | None:
    if option.envvar:
        return str(option.envvar)
    return f"{ctx.auto_envvar_prefix}_{option.name.upper()}" if option.allow_from_autoenv else None


def _argument(argument: TyperArgument) -> Argument:
    metavar = argument.metavar or argument.name.upper()
    return Argument(metavar, argument.required, argument.nargs != 1, argument.help or "")
