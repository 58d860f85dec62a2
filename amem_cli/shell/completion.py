"""The names that a shell completes on TAB: agents and their snapshots, models, domains. Fast, and silent on errors.

`amem __complete KIND WORD...` prints the names of that kind that complete the last word, one per line. The words
before it are the command line so far and may include `--store DIR`. Typer is not loaded.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from platformdirs import user_data_path

from amem_cli.shell.config import read_config
from kvstore.commit import refs
from kvstore.disk import files
from kvstore.errors import AmemError
from kvstore.format.layout import StoreLayout
from kvstore.naming import file_name


def complete(words: Sequence[str]) -> None:
    """Print the names of the kind `words[0]` (agents, refs, models, domains) that start with the last word."""
    kind, *before, prefix = words
    with suppress(AmemError, OSError):  # a missing or damaged store: completion is not the place to report it
        found = sorted(set(_names(StoreLayout(_root(before)), kind, prefix)))
        sys.stdout.write("".join(f"{name}\n" for name in found if name.startswith(prefix)))
        sys.stdout.flush()


def _root(before: Sequence[str]) -> Path:
    """The folder of the store, from the command line, the environment or the config file."""
    chosen = None
    for word, following in pairwise([*before, ""]):
        if word == "--store":
            chosen = following
        elif word.startswith("--store="):
            chosen = word.removeprefix("--store=")
    chosen = chosen or os.environ.get("AMEM_STORE") or read_config().get("store")
    return Path(str(chosen or user_data_path("amem") / "store")).expanduser().absolute()


def _names(layout: StoreLayout, kind: str, prefix: str) -> Iterator[str]:
    if kind == "models":
        yield from _models(layout)
    elif kind == "domains":
        yield from (domain.name for domain in refs.read_domains(layout) if domain.name)
    elif kind == "refs" and "@" in prefix:
        agent = prefix.partition("@")[0]
        yield from (f"{agent}@{snapshot.name}" for snapshot in refs.read_snapshots(layout, agent))
    elif kind in ("agents", "refs"):
        yield from _agents(layout, file_name(prefix))


def _agents(layout: StoreLayout, prefix: str) -> Iterator[str]:
    """Reads matching refs only: a store may have very many."""
    for path in layout.agent_refs.iterdir():
        if path.name.startswith(prefix) and (agent := refs.read_agent(layout, path.name)):
            yield agent.name


def _models(layout: StoreLayout) -> Iterator[str]:
    for path in layout.model_names.glob("*.json"):
        with suppress(ValueError, KeyError):
            yield json.loads(files.read(path))["name"]
