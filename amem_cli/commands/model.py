"""`amem model`: which models this store's agents may use, how they are served, and how many agents fit into memory."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from amem_cli.options import Call, command, new_group
from amem_cli.output import human_size
from amem_cli.units import check_size, parse_size

if TYPE_CHECKING:
    from amem_cli.engine.plan import GroupReport, Layout
    from kvstore.shapes import LayerGroup

app = new_group("Register models, list and forget them; say how they are served, and how many agents fit.")

_CONTEXTS = [1024 << doubled for doubled in range(8)]  # 1K to 128K tokens
Source = Annotated[str, typer.Argument(metavar="MODEL", help="A model, or the path of a config.json.")]


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


@command(app)
def check(call: Call, model: Source) -> None:
    """Say how a model is served, and what an agent of it takes: from its config alone."""
    import amem_cli.engine  # noqa: F401  (chooses the BLAS, before MLX is loaded)
    from amem_cli.engine import plan
    from kvstore.shapes import CODECS, DEFAULT_CODEC

    config = plan.config_of(call.layout, model, call.cache_dir)
    spec, codec = plan.describe_config(config), CODECS[DEFAULT_CODEC]
    groups = plan.report(spec, codec)
    kept = [plan.kept(spec.groups, codec, context) for context in _CONTEXTS]
    for group in groups:
        call.out.line("group", **asdict(group))
    for size in kept:
        call.out.line("context", **asdict(size))
    _show_groups(call, groups)
    call.out.print("")
    rows = [(f"{size.tokens:,}", human_size(size.fp16_bytes), human_size(size.bytes)) for size in kept]
    call.out.table(("TOKENS", "FLOAT16", codec.name.upper()), rows, right=range(3))
    verdict = plan.verdict(groups)
    fields = {"model_type": config["model_type"], "codec": codec.name, "served": True, "verdict": verdict}
    call.out.result(call.command, verdict, **fields)
