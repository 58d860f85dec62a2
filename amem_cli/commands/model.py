"""`amem model`: which models this store's agents may use, how they are served, and how many agents fit into memory."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from amem_cli.shell.options import Call, command, new_group
from amem_cli.shell.output import human_size
from amem_cli.shell.units import check_size, parse_size

if TYPE_CHECKING:
    from amem_cli.engine.models.plan import GroupReport

app = new_group("Register models, list and forget them; say how they are served, and how many agents fit.")

_CONTEXTS = [1024 << doubled for doubled in range(8)]  # 1K to 128K tokens
_MOST_TOKENS = 2**31 - 1  # positions are int32
_GROUP_HEADER = ("LAYERS", "N", "HEADS x DIMS", "DECODE", "FLOAT16/TOKEN", "Q4/TOKEN")
_SERVED = {"handle": "handle (on the codes)", "arrays": "arrays (dequantized)", "states": "states"}
Source = Annotated[str, typer.Argument(metavar="MODEL", help="A model, or the path of a config.json.")]


@command(app)
def add(
    call: Call,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The model's name.")],
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="An MLX folder, a .gguf file, or hub ORG/NAME.")],
    adapter: Annotated[Path | None, typer.Option("--adapter", metavar="DIR", help="A LoRA adapter's folder.")] = None,
) -> None:
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
        call.out.say("no model is registered: `amem model add NAME SOURCE` registers one")
    call.out.result(call.command, models=len(entries))


@command(app)
def rm(call: Call, name: Annotated[str, typer.Argument(metavar="MODEL", help="The model's name.")]) -> None:
    """Forget a model's name; its files stay where they are."""
    from amem_cli.engine.models import registry

    registry.remove(call.layout, name)
    call.out.result(call.command, name=name)


@command(app)
def check(call: Call, model: Source) -> None:
    """Say how a model is served, and what an agent of it takes. Its weights are not read."""
    import amem_cli.engine  # noqa: F401  (chooses the BLAS, before MLX is loaded)
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
    shown = f"served, in decode by {' and '.join(_SERVED[how] for how in served)}"
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
def plan(
    call: Call,
    model: Source,
    memory: Annotated[
        str,
        typer.Option(
            "--memory", metavar="SIZE", callback=check_size, help="Memory for caches: 10.2GiB. Weights aside."
        ),
    ],
    context: Annotated[
        int, typer.Option("--context", metavar="N", min=1, max=_MOST_TOKENS, help="Tokens of each agent.")
    ] = 8192,
    agents: Annotated[
        int | None, typer.Option("--agents", metavar="N", min=1, help="Say whether so many fit; exit code 1 if not.")
    ] = None,
) -> None:
    """Say how many agents fit into memory. The model's weights are not read."""
    import amem_cli.engine  # noqa: F401  (chooses the BLAS, before MLX is loaded)
    from amem_cli.engine.models import paper, plan
    from kvstore.format.codecs import CODECS, DEFAULT_CODEC

    config = plan.config_of(call.layout, model, call.cache_dir)
    codec, room = CODECS[DEFAULT_CODEC], parse_size(memory)
    layouts = plan.layouts(config, codec, context, room)
    counts = paper.published(config, context, *(layout.bytes for layout in layouts[:2]))
    for layout in layouts:
        call.out.line("layout", **asdict(layout))
    rows = [(layout.name, f"{layout.agents:,}", human_size(layout.bytes), layout.what) for layout in layouts]
    call.out.table(("LAYOUT", "AGENTS", "EACH", "WHAT IS KEPT"), rows, right=(1, 2))
    if counts:
        counted = f"the paper, for {counts.model} in 10.2 GB ({counts.memory / 2**20:,.0f} MiB there)"
        call.out.say(f"{counted}: {counts.fp16} in float16, {counts.q4} in 4 bits")
    ours = layouts[-1]
    fits = agents is None or agents <= ours.agents
    if agents is not None:
        need = f"{agents:,} x {human_size(ours.bytes)} = {human_size(agents * ours.bytes)}, of {human_size(room)}"
        call.out.say(f"{need}: {'they fit' if fits else f'too much, {ours.agents:,} fit'}")
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
