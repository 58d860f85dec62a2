"""The command `amem`: a static table of commands, and the one error boundary.

Only the module of the requested command is imported: `amem --help` and `amem inspect` load neither MLX nor
transformers.
"""

import inspect
import os
import sys
import traceback
from importlib import import_module
from keyword import iskeyword
from typing import Annotated, Any, NoReturn

import typer
from typer._click.core import Command  # Typer exports no public names for what it took from click
from typer._click.exceptions import ClickException
from typer._click.exceptions import UsageError as ClickUsageError
from typer.core import TyperCommand
from typer.main import get_command

from amem_cli import __version__
from amem_cli.shell import config, error_boundary, options, signals
from amem_cli.shell.output import Output
from amem_cli.shell.typer_internals import CommandGroup
from kvstore.errors import UsageError

# Name → help text. The module of a command is amem_cli.commands.NAME (`import_`, since `import` is a keyword) and
# defines the Typer app `app`.
COMMANDS = {
    "prefill": "Build an agent's cache from text.",
    "chat": "Send a message to an agent and stream its answer.",
    "extend": "Add context to an agent without generating.",
    "snapshot": "Name a state of an agent.",
    "restore": "Move an agent's head to a state.",
    "fork": "Continue a state as a new agent.",
    "inspect": "Show what is stored.",
    "log": "Show an agent's history, or the journal.",
    "diff": "Show where two states diverge and what they share.",
    "rm": "Remove agents, snapshots or a domain.",
    "gc": "Delete unreachable files; evict agents to free space.",
    "verify": "Check every file and report what is proven.",
    "repair": "Recompute damaged blocks.",
    "batch": "Run many agents' turns in one process, as JSON lines.",
    "export": "Write an agent to a file.",
    "import": "Read an agent from a file.",
    "model": "Register models and plan memory.",
    "doctor": "Check the machine and the store.",
    "demo": "A two-minute tour with a small model.",
}


class _LazyGroup(CommandGroup):
    """Lists the commands of the table, and imports only the one that runs."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {name: TyperCommand(name=name, help=text) for name, text in COMMANDS.items()}

    def load(self, name: str, _command: Command) -> Command:
        return load_command(name)


def _root(ctx: typer.Context, version: bool, **_shared: Any) -> None:
    if version:
        Output(json=ctx.params["json"]).result("version", f"amem {__version__}", version=__version__)
    elif ctx.invoked_subcommand is None:
        raise UsageError("no command given", "`amem --help` lists the commands")


def load_command(name: str) -> Command:
    """Import the module of a command in the table and return the command."""
    return get_command(import_module(f"amem_cli.commands.{name}{'_' * iskeyword(name)}").app)


def root_app() -> typer.Typer:
    """The app of `amem` itself; its commands are imported when they run."""
    help_text = "Keep LLM agents' memory below the prompt: KV caches on disk, resumed in one forward pass."
    app = typer.Typer(cls=_LazyGroup, add_completion=False, rich_markup_mode=None)
    show = Annotated[bool, typer.Option("--version", help="Show the version and exit.", allow_from_autoenv=False)]
    parameters = [
        inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context),
        *options.shared_parameters(environment=True),
        inspect.Parameter("version", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=show),
    ]
    options.declare(_root, parameters)
    app.callback(
        invoke_without_command=True, help=help_text, context_settings={"auto_envvar_prefix": options.ENV_PREFIX}
    )(_root)
    return app


def _dispatch(arguments: list[str], configured: dict[str, Any]) -> int:
    """Run the command line. Returns the exit code; raises any failure."""
    group = get_command(root_app())
    defaults = config.default_map(configured, COMMANDS)
    json = config.wants_json(arguments, configured)
    try:
        with group.make_context("amem", [*arguments], default_map=defaults, obj=json) as ctx:
            group.invoke(ctx)
        sys.stdout.flush()
    except typer.Exit as done:
        return done.exit_code
    except ClickException as error:
        raise _usage_error(error) from error
    return 0


def run() -> NoReturn:
    """The entry point of `amem`: ends the process with an exit code, or by a signal."""
    arguments = sys.argv[1:]
    _prepare_streams()
    configured: dict[str, Any] = {}
    try:
        configured = config.read_config()
        code = _dispatch(arguments, configured)
    except KeyboardInterrupt:
        signals.die(signals.INTERRUPT)
    except BrokenPipeError:
        signals.die(signals.CLOSED)
    except Exception as caught:
        code = _fail(caught, json=config.wants_json(arguments, configured), verbose=config.wants_traceback(arguments))
    sys.exit(code)


def _fail(caught: Exception, *, json: bool, verbose: bool) -> int:
    error = error_boundary.to_amem_error(caught)
    if error is None:
        if verbose:
            traceback.print_exception(caught)
        error = error_boundary.report_bug(
            caught, next((argument for argument in sys.argv[1:] if argument in COMMANDS), "")
        )
    try:
        Output(json=json).error(error)
    except BrokenPipeError:
        signals.die(signals.CLOSED)
    return error.exit_code


def _usage_error(error: ClickException) -> UsageError:
    ctx = error.ctx if isinstance(error, ClickUsageError) else None
    path = ctx.command_path if ctx else "amem"
    return UsageError(error.format_message().rstrip("."), f"see `{path} --help`")


def _prepare_streams() -> None:
    """Write UTF-8 whatever the locale; replace closed streams, and exit if standard output is closed."""
    if sys.stdin is None:
        sys.stdin = os.fdopen(os.open(os.devnull, os.O_RDONLY))
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    if sys.stdout is None:
        sys.stderr.write("amem: standard output is closed\n")
        sys.exit(1)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
