"""What every command shares: its options, and the `Call` that a command receives.

Precedence is flag, environment (`AMEM_` and the option's name), config file. The shared options are taken before the
command and after it; `command` redeclares them, so that a command's own signature shows only what is its own.
"""

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from platformdirs import user_cache_path, user_data_path

from amem_cli import __version__
from amem_cli.shell.config import check_table
from amem_cli.shell.output import Output
from amem_cli.shell.parsing import Group
from kvstore.errors import UsageError
from kvstore.naming import parse_digest

if TYPE_CHECKING:
    from kvstore.commit.journal import Actor
    from kvstore.format.layout import StoreLayout
    from kvstore.store import Store

ENV_PREFIX = "AMEM"
_SHARED: dict[str, tuple[Any, tuple[str, ...], str]] = {
    "store": (str | None, ("--store",), "The folder of the store."),
    "json": (bool, ("--json",), "Write JSON, one object per line."),
    "quiet": (bool, ("--quiet", "-q"), "No figures and no progress."),
    "verbose": (bool, ("--verbose", "-v"), "Say more; show the traceback of a bug."),
    "no_color": (bool, ("--no-color",), "No colours on a terminal."),
}


@dataclass(frozen=True)
class Call:
    """One run of a command: where its store is and how it speaks."""

    command: str
    root: Path
    out: Output

    @property
    def cache_dir(self) -> Path:
        """Where converted models are kept: what is there can be made again."""
        return user_cache_path("amem")

    @property
    def layout(self) -> "StoreLayout":
        """The paths of the store, whether or not it exists."""
        from kvstore.format.layout import StoreLayout

        return StoreLayout(self.root)

    def actor(self) -> "Actor":
        """Who the journal says did it."""
        from kvstore.commit.journal import Actor

        return Actor.here(self.command, __version__, claimed=os.environ.get("AMEM_ACTOR"))

    def open_store(self) -> "Store":
        """The store that must exist. Raises NoStoreError."""
        from kvstore.store import Store

        return Store.open(self.root, self.actor())

    def create_store(self) -> "Store":
        """The store, made when it is not there yet."""
        from kvstore.store import Store

        return Store.open_or_create(self.root, self.actor())


def shared_parameters(*, environment: bool) -> list[inspect.Parameter]:
    """The shared options as parameters of a function that Typer reads.

    They are read from the environment once, before the command: after it, only a flag may change them.
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
    """The Typer app of one command's module."""
    return typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def new_group(help_text: str) -> typer.Typer:
    """The Typer app of a module whose commands stand under one name: the shared options are taken before them, too."""
    app = typer.Typer(cls=Group, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

    def group(**_shared: Any) -> None:
        pass  # the command reads them from its context

    declare(group, shared_parameters(environment=False))
    app.callback(help=help_text)(group)
    return app


def command(app: typer.Typer, name: str | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function, whose first parameter is a `Call`, a command of `app` with the shared options added."""

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
    """Give `function`, which takes keywords, the signature that Typer is to see."""
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
    """What a shared option says after the command, else before it."""
    value = ctx.params[key]
    return value if value or ctx.parent is None else _nearest(ctx.parent, key)


def _digest(text: str | None) -> str | None:
    """The hex digits of a `sha256:PREFIX`. Raises UsageError."""
    prefix = parse_digest(text) if text else None
    if text and prefix is None:
        raise UsageError(f"{text!r} is not a digest", "write sha256: and 4 to 64 hex digits")
    return prefix


def _seconds(value: float) -> float:
    if not value >= 0:  # NaN is no number of seconds either
        raise UsageError(f"--wait {value} is not a number of seconds", "0 gives up at once")
    return value


# What several commands take.
State = Annotated[str, typer.Argument(metavar="REF", help="AGENT, AGENT@SNAPSHOT, AGENT~N or AGENT@sha256:PREFIX.")]
Note = Annotated[str | None, typer.Option("--note", metavar="TEXT", help="Why: it stands in the journal.")]
Wait = Annotated[
    float, typer.Option("--wait", metavar="SECONDS", callback=_seconds, help="How long to wait for a busy agent.")
]
Expect = Annotated[
    str | None, typer.Option("--expect", metavar="DIGEST", callback=_digest, help="Refuse if the head is another one.")
]
ModelName = Annotated[
    str | None, typer.Option("--model", metavar="MODEL", help="A registered name, a folder, a .gguf file or ORG/NAME.")
]
DEFAULT_WAIT = 10.0
