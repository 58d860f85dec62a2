"""`amem import`: read an agent from a file that `export` wrote, or from a prompt cache of mlx-lm."""

import json
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from amem_cli.shell.formats import Format, FormatName, check_format
from amem_cli.shell.options import DEFAULT_WAIT, Call, ModelName, Wait, command, new_app
from amem_cli.shell.output import counted, digest, human_size
from kvstore.errors import NotFoundError, UsageError
from kvstore.format.document import as_dict
from kvstore.format.kinds import BLOCK
from kvstore.naming import check_name

app = new_app()

File = Annotated[str, typer.Argument(metavar="FILE|-", help="The file; - is standard input.")]
NewName = Annotated[str | None, typer.Argument(metavar="NAME", help="Name of the agent; that in the file if omitted.")]
DomainName = Annotated[
    str | None, typer.Option("--domain", metavar="D", help="Import into this domain instead of the agent's own.")
]
AsNew = Annotated[bool, typer.Option("--as-new", help="Give the agent a new id, if its own exists here.")]
TokensFile = Annotated[
    str | None, typer.Option("--tokens", metavar="FILE", help="Token ids of a prompt cache, as a JSON list.")
]


@command(app)
def import_(
    call: Call,
    file: File,
    name: NewName = None,
    domain: DomainName = None,
    as_new: AsNew = False,
    format: FormatName = "amem",  # noqa: A002 (the option's name)
    model: ModelName = None,
    tokens: TokensFile = None,
    wait: Wait = DEFAULT_WAIT,
) -> None:
    """Read an agent from a file. Every byte is checked before anything is committed."""
    form = check_format(format)
    for kind, text in (("agent", name), ("domain", domain)):
        if text is not None:
            check_name(kind, text)
    if form is Format.MLX_LM:
        if as_new:
            raise UsageError(
                "--as-new cannot be combined with --format mlx-lm", "a prompt cache always makes a new agent"
            )
        _import_mlx(call, file, name, domain, model, tokens, wait)
    elif tokens:
        raise UsageError("--tokens needs --format mlx-lm", "add it, or leave --tokens out")
    else:
        _import(call, file, name, domain, as_new, wait)


def _import(call: Call, file: str, name: str | None, domain: str | None, as_new: bool, wait: float) -> None:
    from kvstore.archive.import_agent import import_agent

    with _opened(file) as stream:
        made = import_agent(call.create_store(), stream, name, domain=domain, as_new=as_new, wait=wait)
    call.out.info(
        f"{made.agent}: {counted(made.tokens, 'token')}, {counted(made.states, 'state')}, "
        f"{made.new_blocks} of {counted(made.blocks, BLOCK.name)} new, {human_size(made.bytes_written)} written"
    )
    values = asdict(made)
    values |= {"domain": made.domain.name or made.domain.id, "manifest": digest(made.manifest)}
    call.out.result(call.command, made.agent, format=Format.AMEM.value, **values)


def _import_mlx(
    call: Call, file: str, name: str | None, domain: str | None, model: str | None, tokens: str | None, wait: float
) -> None:
    if name is None or model is None:
        raise UsageError("a prompt cache needs NAME and --model", "it records neither the agent nor the model")
    if file == "-":
        raise UsageError("a prompt cache cannot be read from standard input", "name a file")
    if not Path(file).is_file():
        raise NotFoundError(f"no such file: {file}")
    if Path(file).suffix != ".safetensors":
        raise UsageError(f"{file} does not end with .safetensors", "mlx-lm needs that to read a prompt cache")
    ids = None if tokens is None else _token_ids(tokens)

    from amem_cli.engine.models import registry
    from amem_cli.engine.turns.import_mlx_lm import import_file

    entry = registry.find(call.layout, model)
    made = import_file(
        call.create_store(), entry, call.cache_dir, Path(file), name, tokens=ids, domain=domain, wait=wait
    )
    call.out.warn(
        f"quantization error (RMS): {made.loss.keys:.1%} of the keys, {made.loss.values:.1%} of the values; "
        f"whether {made.model.name} computed them was not checked"
    )
    values = asdict(made)
    del values["model"]
    claimed = as_dict(made.model)
    values["manifest"] = digest(made.manifest)
    call.out.result(
        call.command, made.agent, format=Format.MLX_LM.value, model=claimed["name"], claimed_model=claimed, **values
    )


def _opened(file: str) -> AbstractContextManager[BinaryIO]:
    """A file, or standard input, opened for reading. Raises NotFoundError."""
    if file == "-":
        return nullcontext(sys.stdin.buffer)
    try:
        return Path(file).open("rb")
    except FileNotFoundError as error:
        raise NotFoundError(f"no such file: {file}") from error


def _token_ids(file: str) -> list[int]:
    """The token ids in a file: a JSON list of integers. Raises NotFoundError and UsageError."""
    with _opened(file) as stream:
        try:
            ids = json.loads(stream.read())
        except ValueError as error:
            raise UsageError(f"{file} is not JSON", "write a list of token ids, such as [1, 2, 3]") from error
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise UsageError(f"{file} is not a list of token ids", "write one such as [1, 2, 3]")
    return ids
