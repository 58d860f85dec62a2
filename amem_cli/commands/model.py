"""`amem model`: register models, show how they are supported, and plan how many agents fit into memory."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from amem_cli.shell.options import Call, command, new_group
from amem_cli.shell.output import Output, human_size
from amem_cli.shell.quantities import check_size, parse_size

if TYPE_CHECKING:
    from amem_cli.engine.models.plan import GroupReport, MemoryLayout

app = new_group("Register, list and forget models; check their support and plan memory.")

_CONTEXTS = [1024 << doubled for doubled in range(8)]  # 1K to 128K tokens
_MOST_TOKENS = 2**31 - 1  # positions are int32
_GROUP_HEADER = ("LAYERS", "N", "HEADS x DIMS", "DECODE", "FLOAT16/TOKEN", "Q4/TOKEN")
_SERVED = {"handle": "quantized codes", "arrays": "dequantized arrays", "states": "recurrent states"}

NewName = Annotated[str, typer.Argument(metavar="NAME", help="Name to register.")]
Source = Annotated[str, typer.Argument(metavar="SOURCE", help="An MLX folder, a .gguf file, or hub ORG/NAME.")]
Adapter = Annotated[Path | None, typer.Option("--adapter", metavar="DIR", help="Folder of a LoRA adapter.")]
Registered = Annotated[str, typer.Argument(metavar="MODEL", help="Name of a registered model.")]
ModelOrConfig = Annotated[str, typer.Argument(metavar="MODEL", help="A model, or the path of a config.json.")]
Memory = Annotated[
    str,
    typer.Option("--memory", metavar="SIZE", callback=check_size, help="Memory for caches, without weights: 10.2GiB."),
]
Context = Annotated[int, typer.Option("--context", metavar="N", min=1, max=_MOST_TOKENS, help="Tokens of each agent.")]
Agents = Annotated[
    int | None, typer.Option("--agents", metavar="N", min=1, help="Check that N agents fit; exit code 1 if not.")
]


@command(app)
def add(call: Call, name: NewName, source: Source, adapter: Adapter = None) -> None:
    """Register a model under a name."""
    from amem_cli.engine.models import registry

    store = call.create_store()
    entry = registry.add(store.layout, name, source, adapter)
    call.out.result(call.command, entry.name, name=entry.name, source=entry.source, kind=entry.kind)


@command(app)
def ls(call: Call) -> None:
    """List the registered models."""
    from amem_cli.engine.models import registry

    entries = registry.entries(call.layout)
    for entry in entries:
        call.out.line("model", name=entry.name, source=entry.source, kind=entry.kind)
    if entries:
        call.out.table(("NAME", "KIND", "SOURCE"), [(entry.name, entry.kind, entry.source) for entry in entries])
    else:
        call.out.info("no models registered; add one with `amem model add NAME SOURCE`")
    call.out.result(call.command, models=len(entries))


@command(app)
def rm(call: Call, name: Registered) -> None:
    """Forget a model; its files are not deleted."""
    from amem_cli.engine.models import registry

    registry.remove(call.layout, name)
    call.out.result(call.command, name=name)


@command(app)
def check(call: Call, model: ModelOrConfig) -> None:
    """Show how a model is supported and the memory of its agents. Its weights are not read."""
    import amem_cli.engine  # noqa: F401  (selects the BLAS before MLX is loaded)
    from amem_cli.engine.models import plan
    from kvstore.format.codecs import CODECS, DEFAULT_CODEC

    config = plan.config_of(call.layout, model, call.cache_dir)
    spec, codec = plan.describe_config(config), CODECS[DEFAULT_CODEC]
    groups = plan.report(spec, codec)
    sizes = [plan.kept(spec.groups, codec, context) for context in _CONTEXTS]
    for group in groups:
        call.out.line("group", **asdict(group))
    for size in sizes:
        call.out.line("context", **asdict(size))
    call.out.table(_GROUP_HEADER, [_group_row(group) for group in groups], right=(1, 2, 4, 5))
    rows = [(f"{size.tokens:,}", human_size(size.fp16_bytes), human_size(size.bytes)) for size in sizes]
    call.out.print("")
    call.out.table(("TOKENS", "FLOAT16", "AMEM"), rows, right=range(3))
    served = sorted({group.served for group in groups})
    shown = f"supported; decode reads {' and '.join(_SERVED[how] for how in served)}"
    call.out.result(call.command, shown, model_type=config["model_type"], codec=codec.name, served=served)


def _group_row(group: "GroupReport") -> tuple[str, ...]:
    window = f" of {group.window}" if group.window else ""
    dims = "" if group.served == "states" else f"{group.kv_heads} x {group.key_dim}/{group.value_dim}"
    plain, coded = group.fp16_bytes_per_token, round(group.bytes_per_token)
    if group.served == "states":
        return group.id, str(group.layers), dims, group.served, human_size(group.state_bytes), "in all"
    kind = f"{group.id}{window}{', latents' if group.latent else ''}"
    return kind, str(group.layers), dims, group.served, f"{plain:,} B", f"{coded:,} B"


@command(app)
def plan(call: Call, model: ModelOrConfig, memory: Memory, context: Context = 8192, agents: Agents = None) -> None:
    """Show how many agents fit into memory. The model's weights are not read."""
    import amem_cli.engine  # noqa: F401  (selects the BLAS before MLX is loaded)
    from amem_cli.engine.models import paper, plan
    from kvstore.format.codecs import CODECS, DEFAULT_CODEC

    config = plan.config_of(call.layout, model, call.cache_dir)
    codec, room = CODECS[DEFAULT_CODEC], parse_size(memory)
    layouts = plan.layouts(config, codec, context, room)
    counts = paper.published(config, context, *(layout.bytes for layout in layouts[:2]))
    ours = layouts[-1]
    fits = agents is None or agents <= ours.agents
    _print_layouts(call.out, layouts)
    if counts:
        memory_there = f"10.2 GB ({counts.memory / 2**20:,.0f} MiB)"
        call.out.info(f"the paper, {counts.model} in {memory_there}: {counts.fp16} in float16, {counts.q4} in 4 bits")
    if agents is not None:
        _print_fit(call.out, agents, ours, room)
    call.out.result(
        call.command,
        ok=fits,
        codec=codec.name,
        memory=room,
        context=context,
        agents=ours.agents,
        agent_bytes=ours.bytes,
        wanted=agents,
        paper=asdict(counts) if counts else None,
    )
    if not fits:
        raise typer.Exit(1)


def _print_layouts(out: Output, layouts: "Sequence[MemoryLayout]") -> None:
    for layout in layouts:
        out.line("layout", **asdict(layout))
    rows = [(layout.name, f"{layout.agents:,}", human_size(layout.bytes), layout.what) for layout in layouts]
    out.table(("LAYOUT", "AGENTS", "EACH", "WHAT IS KEPT"), rows, right=(1, 2))


def _print_fit(out: Output, agents: int, layout: "MemoryLayout", memory: int) -> None:
    """Whether so many agents fit into `memory` bytes."""
    need = f"{agents:,} x {human_size(layout.bytes)} = {human_size(agents * layout.bytes)} of {human_size(memory)}"
    out.info(f"{need}: {'they fit' if agents <= layout.agents else f'only {layout.agents:,} fit'}")
