"""`amem model`: which models this store's agents may use."""

from pathlib import Path
from typing import Annotated

import typer

from amem_cli.options import Call, command, new_group

app = new_group("Register models, list and forget them.")


@command(app)
def add(
    call: Call,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The model's name.")],
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="An MLX folder, a .gguf file, or hub ORG/NAME.")],
    adapter: Annotated[Path | None, typer.Option("--adapter", metavar="DIR", help="A LoRA adapter's folder.")] = None,
) -> None:
    """Register a model under a name."""
    from amem_cli.engine import registry

    store = call.create_store()
    entry = registry.add(store.layout, name, source, adapter)
    call.out.result(call.command, entry.name, name=entry.name, source=entry.source, kind=entry.kind)


@command(app)
def ls(call: Call) -> None:
    """List the registered models."""
    from amem_cli.engine import registry

    entries = registry.entries(call.layout)
    for entry in entries:
        call.out.line("model", name=entry.name, source=entry.source, kind=entry.kind)
    if entries:
        call.out.table(("NAME", "KIND", "SOURCE"), [(entry.name, entry.kind, entry.source) for entry in entries])
    else:
        call.out.say("no model is registered: `amem model add NAME SOURCE` registers one")
    call.out.result(call.command, models=len(entries))


@command(app)
def rm(call: Call, name: Annotated[str, typer.Argument(metavar="MODEL", help="The model's name.")]) -> None:
    """Forget a model's name; its files stay where they are."""
    from amem_cli.engine import registry

    registry.remove(call.layout, name)
    call.out.result(call.command, name=name)
