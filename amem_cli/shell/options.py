"""The options that commands share, and the `Call` that a command receives.

Precedence is flag, environment (`AMEM_` and the option's name), config file. The shared options are accepted before
and after the command's name; `command` adds them, so that a command's signature has only its own parameters.
"""

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from platformdirs import user_cache_path, user_data_path

from amem_cli import __version__
from amem_cli.shell.config import check_table
from amem_cli.shell.output import Output
from amem_cli.shell.typer_internals import CommandGroup
from kvstore.errors import UsageError
from kvstore.naming import parse_digest

if TYPE_CHECKING:
    from kvstore.commit.journal import Actor
    from kvstore.format.layout import StoreLayout
    from kvstore.store import Store

ENV_PREFIX = "AMEM"
_SHARED: dict[str, tuple[Any, tuple[str, ...], str]] = {
    "store": (str | None, ("--store",), "Folder of the store."),
    "json": (bool, ("--json",), "Write JSON, one object per line."),
    "quiet": (bool, ("--quiet", "-q"), "No figures and no progress."),
    "verbose": (bool, ("--verbose", "-v"), "More detail; show the traceback of a bug."),
    "no_color": (bool, ("--no-color",), "No colours on a terminal."),
}


@dataclass(frozen=True)
class Call:
    """One run of a command: its name, the folder of its store and its output."""

    command: str
    root: Path
    out: Output

    @property
    def cache_dir(self) -> Path:
        """The folder of converted models, which can be recreated."""
        return user_cache_path("amem")

    @property
    def layout(self) -> "StoreLayout":
        """The paths in the store, which need not exist."""
        from kvstore.format.layout import StoreLayout

        return StoreLayout(self.root)

    def actor(self) -> "Actor":
        """The author of this command's entries in the journal."""
        from kvstore.commit.journal import Actor

        return Actor.here(self.command, __version__, claimed=os.environ.get("AMEM_ACTOR"))

    def open_store(self) -> "Store":
        """The existing store. Raises NoStoreError."""
        from kvstore.store import Store

        return Store.open(self.root, self.actor())

    def create_store(self) -> "Store":
        """The store, created if it does not exist."""
        from kvstore.store import Store

        return Store.open_or_create(self.root, self.actor())


def shared_parameters(*, environment: bool) -> list[inspect.Parameter]:
    """The shared options as parameters for Typer.

    The environment sets them once, before the command; after the command only a flag may change them.
    """
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=False if kind is bool else None,
            annotation=Annotated[
                kind,
                typer.Option(
                    *flags, metavar=None if kind is bool else "DIR", help=text, allow_from_autoenv=environment
                ),
            ],
        )
        for name, (kind, flags, text) in _SHARED.items()
    ]


def new_app() -> typer.Typer:
    """The Typer app of a module with one command."""
    return typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def new_group(help_text: str) -> typer.Typer:
    """The Typer app of a module with subcommands, which accepts the shared options before them too."""
    app = typer.Typer(cls=CommandGroup, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

    def group(**_shared: Any) -> None:
        pass  # the command reads them from its context

    declare(group, shared_parameters(environment=False))
    app.callback(help=help_text)(group)
    return app


def command(app: typer.Typer, name: str | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function, whose first parameter is a `Call`, as a command of `app` with the shared options added."""

    def add(function: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(function).parameters.values())[1:]

        def run(ctx: typer.Context, **values: Any) -> None:
            own_values = {key: value for key, value in values.items() if key not in _SHARED}
            check_table(ctx.default_map or {}, (parameter.name for parameter in ctx.command.params))
            function(_call(ctx), **own_values)

        context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
        own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
        declare(run, [context, *own, *shared_parameters(environment=False)])
        run.__name__, run.__doc__ = function.__name__, function.__doc__
        app.command(name, context_settings={"auto_envvar_prefix": ENV_PREFIX})(run)
        return function

    return add


def declare(function: Callable[..., None], parameters: list[inspect.Parameter]) -> None:
    """Set the signature that Typer reads from `function`, which accepts any keywords."""
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}


def _call(ctx: typer.Context) -> Call:
    given = {key: _nearest(ctx, key) for key in _SHARED}
    out = Output(
        json=given["json"],
        quiet=given["quiet"],
        verbose=given["verbose"],
        color=not (given["no_color"] or os.environ.get("NO_COLOR")),
    )
    root = Path(given["store"] or user_data_path("amem") / "store")
    return Call(ctx.command_path.removeprefix("amem "), root.expanduser().absolute(), out)


def _nearest(ctx: Any, key: str) -> Any:
    """The value of a shared option after the command's name, or else before it."""
    value = ctx.params[key]
    return value if value or ctx.parent is None else _nearest(ctx.parent, key)


def _digest(text: str | None) -> str | None:
    """The hex digits of a `sha256:PREFIX`. Raises UsageError."""
    prefix = parse_digest(text) if text else None
    if text and prefix is None:
        raise UsageError(f"{text!r} is not a digest", "write sha256: and 4 to 64 hex digits")
    return prefix


def _seconds(value: float) -> float:
    if not value >= 0:  # also refuses NaN
        raise UsageError(f"--wait must be 0 or more seconds, not {value}", "0 fails at once if the agent is busy")
    return value


# Arguments and options of several commands.
State = Annotated[str, typer.Argument(metavar="REF", help="AGENT, AGENT@SNAPSHOT, AGENT~N or AGENT@sha256:PREFIX.")]
AgentName = Annotated[str, typer.Argument(metavar="AGENT", help="Name of the agent.")]
TextFiles = Annotated[list[str] | None, typer.Argument(metavar="FILE", help="Text; - is standard input.")]
Role = Annotated[Literal["user", "assistant"], typer.Option("--role", help="Author of the text.")]
Raw = Annotated[bool, typer.Option("--raw", help="Add no template; parse control tokens in the text.")]
Note = Annotated[str | None, typer.Option("--note", metavar="TEXT", help="Reason, recorded in the journal.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be removed; change nothing.")]
ShowText = Annotated[bool, typer.Option("--text", help="Show the conversation, decoded by the model's tokenizer.")]
Wait = Annotated[
    float, typer.Option("--wait", metavar="SECONDS", callback=_seconds, help="How long to wait for a busy agent.")
]
Expect = Annotated[
    str | None, typer.Option("--expect", metavar="DIGEST", callback=_digest, help="Fail if the head is another state.")
]
ModelName = Annotated[
    str | None, typer.Option("--model", metavar="MODEL", help="A registered name, a folder, a .gguf file or ORG/NAME.")
]
DEFAULT_WAIT = 10.0
