"""How amem changes Typer's reading of a command line. This module isolates Typer's private API."""

from typing import Any

import typer
from typer._click.core import Command, Context, Parameter  # Typer exports no public names for what it took from click
from typer._coercion import PassThroughRuntimeParam
from typer.core import TyperArgument, TyperGroup, TyperOption

from amem_cli.shell.output import Output


class CommandGroup(TyperGroup):
    """Commands under one name. `ctx.obj` of the root says whether the command line asks for JSON."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        _adapt(self.get_params(ctx))
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Context, args: list[str]) -> tuple[str | None, Command | None, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None and command is not None:
            command = self.load(name, command)
            _adapt(command.get_params(ctx))
        return name, command, rest

    def load(self, _name: str, command: Command) -> Command:
        """The command to run for the entry `command` of this group."""
        return command


def _adapt(parameters: list[Parameter]) -> None:
    """Pass text through unchanged: Typer would import pydantic for it, which takes longer than all of `amem --help`."""
    for parameter in parameters:
        if not isinstance(parameter, TyperArgument | TyperOption):
            continue
        if parameter.type_descriptor.annotation is str or parameter.name == "help":
            parameter._runtime_param = PassThroughRuntimeParam(parameter.type_descriptor.parameter_info, str)
        if parameter.name == "help":
            parameter.callback = _show_help


def _show_help(ctx: Context, _parameter: Parameter, wanted: Any) -> None:
    """Print a command's help, as text or as JSON."""
    if wanted:
        text = ctx.get_help()
        Output(json=bool(ctx.find_root().obj)).result("help", text, topic=ctx.command_path, help=text)
        raise typer.Exit
