"""`amem import`: an agent out of a file that `export` wrote, or out of an mlx-lm prompt cache."""

import json
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from amem_cli.shell.formats import Format, check_format
from amem_cli.shell.options import DEFAULT_WAIT, Call, ModelName, Wait, command, new_app
from amem_cli.shell.output import digest, human_size
from kvstore.errors import NotFoundError, UsageError
from kvstore.format.document import as_dict
from kvstore.naming import check_name

app = new_app()


@command(app)
def import_(
    call: Call,
    file: Annotated[str, typer.Argument(metavar="FILE|-", help="The file; - is standard input.")],
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="The agent's name here; its own if left out.")
    ] = None,
    domain: Annotated[
        str | None, typer.Option("--domain", metavar="D", help="Put it into this domain instead of its own.")
    ] = None,
    as_new: Annotated[bool, typer.Option("--as-new", help="Give it an id of its own: it is here already.")] = False,
    format: Annotated[  # noqa: A002 (the option's name)
        str, typer.Option("--format", metavar="FORMAT", help="amem, or mlx-lm: a prompt cache.")
    ] = "amem",
    model: ModelName = None,
    tokens: Annotated[
        str | None, typer.Option("--tokens", metavar="FILE", help="A prompt cache's token ids, as a JSON list.")
    ] = None,
    wait: Wait = DEFAULT_WAIT,
) -> None:
    """Read an agent from a file. Every byte is checked before anything is linked in."""
    form = check_format(format)
    for kind, text in (("agent", name), ("domain", domain)):
        if text is not None:
            check_name(kind, text)
    if form is Format.MLX_LM:
        if as_new:
            raise UsageError("a prompt cache always makes a new agent", "leave --as-new out")
        _import_mlx(call, file, name, domain, model, tokens, wait)
    elif tokens:
        raise UsageError("--tokens is for prompt caches", "add --format mlx-lm, or leave it out")
    else:
        _import(call, file, name, domain, as_new, wait)


def _import(call: Call, file: str, name: str | None, domain: str | None, as_new: bool, wait: float) -> None:
    from kvstore.archive.import_agent import import_agent

    with _opened(file) as stream:
        made = import_agent(call.create_store(), stream, name, domain=domain, as_new=as_new, wait=wait)
    call.out.say(
        f"{made.agent}: {made.tokens} tokens, {made.states} states, "
        f"{made.new_blocks} of {made.blocks} blocks new, {human_size(made.bytes_written)} written"
    )
    values = asdict(made)
    values |= {"domain": made.domain.name or made.domain.id, "manifest": digest(made.manifest)}
    call.out.result(call.command, made.agent, format=Format.AMEM.value, **values)


def _import_mlx(
    call: Call, file: str, name: str | None, domain: str | None, model: str | None, tokens: str | None, wait: float
) -> None:
    if name is None or model is None:
        raise UsageError("a prompt cache does not say whose it is", "give NAME, and --model for what computed it")
    if file == "-":
        raise UsageError("a prompt cache cannot be read from standard input", "name the file")
    if not Path(file).is_file():
        raise NotFoundError(f"there is no file {file}", "check the path")
    if Path(file).suffix != ".safetensors":
        raise UsageError(f"mlx-lm reads no prompt cache of the name {file}", "let its name end with .safetensors")
    ids = None if tokens is None else _token_ids(tokens)

    from amem_cli.engine.models import registry
    from amem_cli.engine.turns.import_mlx_lm import import_file

    entry = registry.find(call.layout, model)
    made = import_file(
        call.create_store(), entry, call.cache_dir, Path(file), name, tokens=ids, domain=domain, wait=wait
    )
    call.out.warn(
        f"quantizing took {made.loss.keys:.1%} of the keys and {made.loss.values:.1%} of the values (RMS); "
        f"that {made.model.name} computed them is what you said, and was not checked"
    )
    values = asdict(made)
    del values["model"]
    claimed = as_dict(made.model)
    values["manifest"] = digest(made.manifest)
    call.out.result(
        call.command, made.agent, format=Format.MLX_LM.value, model=claimed["name"], claimed_model=claimed, **values
    )


def _opened(file: str) -> AbstractContextManager[BinaryIO]:
    """The bytes of a file, or of standard input. Raises NotFoundError."""
    if file == "-":
        return nullcontext(sys.stdin.buffer)
    try:
        return Path(file).open("rb")
    except FileNotFoundError as error:
        raise NotFoundError(f"there is no file {file}", "check the path") from error


def _token_ids(file: str) -> list[int]:
    """The ids in a file: a JSON list of whole numbers."""
    with _opened(file) as stream:
        try:
            ids = json.loads(stream.read())
        except ValueError as error:
            raise UsageError(f"{file} is not JSON", "write a list of token ids, as in [1, 2, 3]") from error
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise UsageError(f"{file} is not a list of token ids", "write one as in [1, 2, 3]")
    return ids
