"""The config file, and the switches that are needed before the command line is parsed.

Keys are the names of long options. Outside of tables they apply to every command that has the option; in a table
such as `[chat]`, to that command only.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from platformdirs import user_config_path

from kvstore.errors import NotFoundError, UsageError

SHARED_KEYS = frozenset({"store", "json", "quiet", "verbose", "no_color"})
_COMMON_KEYS = SHARED_KEYS | {"model", "codec", "wait"}


def config_path() -> Path:
    """`$AMEM_CONFIG`, or config.toml in the platform's config folder."""
    return Path(os.environ.get("AMEM_CONFIG") or user_config_path("amem") / "config.toml")


def read_config() -> dict[str, Any]:
    """The values of the config file by parameter name; empty if there is no file.

    Raises UsageError if it is not TOML or has an unknown key, NotFoundError if `$AMEM_CONFIG` names a missing file.
    """
    path = config_path()
    try:
        text = path.read_bytes()
    except FileNotFoundError as error:
        if "AMEM_CONFIG" in os.environ:
            raise NotFoundError(f"no such config file: {path}", "check the variable AMEM_CONFIG") from error
        return {}
    import tomllib

    try:
        values = tomllib.loads(text.decode())
    except ValueError as error:
        raise UsageError(f"config file {path} is not valid TOML: {error}") from error
    config = {_parameter(key): _table(value) for key, value in values.items()}
    _refuse(key for key, value in config.items() if not isinstance(value, dict) and key not in _COMMON_KEYS)
    return config


def default_map(config: Mapping[str, Any], commands: Iterable[str]) -> dict[str, Any]:
    """The config file as Typer's default map: for each command the common keys, overridden by its own table.

    The shared options are read once, before the command, so that the environment overrides the file.
    Raises UsageError for a table that no command has, and for a shared option in a table.
    """
    tables = {key: value for key, value in config.items() if isinstance(value, dict)}
    plain = {key: value for key, value in config.items() if key not in tables}
    shared = {key: value for key, value in plain.items() if key in SHARED_KEYS}
    common = {key: value for key, value in plain.items() if key not in SHARED_KEYS}
    names = set(commands)
    _refuse(key for key in tables if key not in names)
    _refuse(key for table in tables.values() for key in table if key in SHARED_KEYS)
    return {**shared, **{name: {**common, **tables.get(name, {})} for name in names}}


def _parameter(key: str) -> str:
    return key.replace("-", "_")


def _table(value: Any) -> Any:
    return {_parameter(key): inner for key, inner in value.items()} if isinstance(value, dict) else value


def _refuse(unknown: Iterable[str]) -> None:
    names = ", ".join(sorted(key.replace("_", "-") for key in unknown))
    if names:
        common = ", ".join(sorted(key.replace("_", "-") for key in _COMMON_KEYS))
        hint = f"options of one command go into its table, such as [chat]; allowed outside of tables: {common}"
        raise UsageError(f"config file {config_path()}: unknown or misplaced keys: {names}", hint)


def check_table(table: Mapping[str, Any], parameters: Iterable[str]) -> None:
    """Raise UsageError for a key without an option in the command: a misspelt key must not be ignored silently."""
    known = {*parameters, *_COMMON_KEYS}
    _refuse(key for key in table if key not in known)


def wants_json(arguments: Iterable[str], config: Mapping[str, Any]) -> bool:
    """Whether to report an error as JSON, even if the command line could not be parsed."""
    flags = []
    for argument in arguments:
        if argument == "--":
            break
        flags.append(argument)
    return "--json" in flags or _switched_on("AMEM_JSON") or config.get("json") is True


def wants_traceback(arguments: Iterable[str]) -> bool:
    """Whether to print the traceback of a bug."""
    return bool({"-v", "--verbose"} & set(arguments)) or _switched_on("AMEM_VERBOSE")


def _switched_on(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in {"1", "true", "t", "yes", "y", "on"}
