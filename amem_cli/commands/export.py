"""`amem export`: write an agent's state, or its history, to one file."""

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from amem_cli.shell.formats import Format, FormatName, check_format
from amem_cli.shell.options import Call, State, command, new_app
from amem_cli.shell.output import counted, digest, human_size
from kvstore.errors import UsageError
from kvstore.format.kinds import MANIFEST
from kvstore.naming import Ref, parse_ref

if TYPE_CHECKING:
    from kvstore.store import Store

app = new_app()

OutputFile = Annotated[
    str, typer.Option("--output", "-o", metavar="FILE|-", help="File to write; standard output if omitted.")
]
Lineage = Annotated[bool, typer.Option("--lineage", help="Include the agent's history and snapshots.")]


@command(app)
def export(
    call: Call,
    ref: State,
    output: OutputFile = "-",
    lineage: Lineage = False,
    format: FormatName = "amem",  # noqa: A002 (the option's name)
) -> None:
    """Write a state to a file that `amem import` reads."""
    state, form = parse_ref(ref), check_format(format)
    if output == "-" and (call.out.json or sys.stdout.isatty()):
        raise UsageError("cannot write the file to a terminal or between JSON lines", "name a file with -o FILE")
    if lineage and form is Format.MLX_LM:
        raise UsageError("--lineage cannot be combined with --format mlx-lm", "a prompt cache holds one state")
    store = call.open_store()
    target = None if output == "-" else Path(output)
    if form is Format.MLX_LM:
        _export_mlx(call, store, state, target)
    else:
        _export(call, store, state, target, lineage)


def _export(call: Call, store: "Store", ref: Ref, target: Path | None, lineage: bool) -> None:
    from kvstore.archive.export import exporting

    with exporting(store, ref, lineage=lineage) as found:
        sha256, size = _write(target, found.pieces)
    contents = found.contents
    states = sum(listed.kind is MANIFEST for listed, _ in contents.files)
    call.out.info(f"{ref}: {counted(states, 'state')}, {counted(len(contents.files), 'file')}, {human_size(size)}")
    call.out.result(
        call.command,
        None if target is None else str(target),
        ref=str(ref),
        state=digest(contents.head),
        file=None if target is None else str(target),
        format=Format.AMEM.value,
        bytes=size,
        sha256=sha256,
        states=states,
        files=len(contents.files),
        snapshots=len(contents.snapshots),
        agent_id=contents.agent_id,
        domain=contents.domain.id,
    )


def _export_mlx(call: Call, store: "Store", ref: Ref, target: Path | None) -> None:
    from amem_cli.engine.persist import mlx_lm

    state = store.resolve(ref)
    sha256, size = _write(target, mlx_lm.export(store, state))
    codec = state.manifest.codec.name
    loss = f"keys and values are dequantized from {codec} to bfloat16; the loss of quantization is not undone"
    call.out.warn(loss)
    if state.manifest.pending:
        pending = counted(state.manifest.pending, "token")
        call.out.info(f"the last {pending} are not in the cache yet, so not in the file")
    call.out.result(
        call.command,
        None if target is None else str(target),
        ref=str(ref),
        state=digest(state.digest),
        file=None if target is None else str(target),
        format=Format.MLX_LM.value,
        bytes=size,
        sha256=sha256,
        tokens=state.manifest.cached,
        pending=state.manifest.pending,
        model=state.manifest.model.name,
        loss=loss,
    )


def _write(target: Path | None, pieces: Iterator[bytes]) -> tuple[str, int]:
    """Write the pieces to `target`, or to standard output. Returns their SHA-256 and size."""
    from kvstore.archive.export import write_file

    hasher, size = hashlib.sha256(), 0

    def counted() -> Iterator[bytes]:
        nonlocal size
        for piece in pieces:
            hasher.update(piece)
            size += len(piece)
            yield piece

    if target is None:
        for piece in counted():
            sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()
    else:
        write_file(target, counted())
    return hasher.hexdigest(), size
