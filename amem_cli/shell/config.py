"""The config file, and the few switches that are needed before the command line can be read.

Keys are the long options. Outside of a table they hold for every command that has the option; in a command's own
table, as `[chat]`, for that one.
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
    """The config file with option names as the parameters have them; empty when there is none.

    Raises UsageError where it is not TOML or has an unknown key, NotFoundError when `$AMEM_CONFIG` does not exist.
    """
    path = config_path()
    try:
        text = path.read_bytes()
    except FileNotFoundError as error:
        if "AMEM_CONFIG" in os.environ:
            raise NotFoundError(f"there is no config file {path}", "AMEM_CONFIG names it") from error
        return {}
    import tomllib

    try:
        values = tomllib.loads(text.decode())
    except ValueError as error:
        raise UsageError(f"the config file {path} is not TOML: {error}") from error
    config = {_parameter(key): _table(value) for key, value in values.items()}
    _refuse(key for key, value in config.items() if not isinstance(value, dict) and key not in _COMMON_KEYS)
    return config


def default_map(config: Mapping[str, Any], commands: Iterable[str]) -> dict[str, Any]:
    """The config file as Typer takes it: for each command the common keys, and then its own table's.

    The shared options are read once, before the command, so that the environment stays ahead of the file.
    Raises UsageError for a table that is no command's, or that has a shared option.
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
        hint = f"options of one command stand in its table, as in [chat]; outside of a table: {common}"
        raise UsageError(f"the config file {config_path()} has keys where they mean nothing: {names}", hint)


def check_table(table: Mapping[str, Any], parameters: Iterable[str]) -> None:
    """Refuse a key that the command has no option for: a misspelt one would be ignored in silence.

    Raises UsageError.
    """
    known = {*parameters, *_COMMON_KEYS}
    _refuse(key for key in table if key not in known)


def wants_json(arguments: Iterable[str], config: Mapping[str, Any]) -> bool:
    """Whether an error is to be told in JSON, even where the command line itself could not be read."""
    flags = []
    for argument in arguments:
        if argument == "--":
            break
        flags.append(argument)
    return "--json" in flags or _switched_on("AMEM_JSON") or config.get("json") is True


def wants_traceback(arguments: Iterable[str]) -> bool:
    """Whether a bug's traceback may be shown on the terminal."""
    return bool({"-v", "--verbose"} & set(arguments)) or _switched_on("AMEM_VERBOSE")


def _switched_on(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in {"1", "true", "t", "yes", "y", "on"}
