"""`amem inspect`: what is stored, shared and owed. Reads small files only, takes no lock and writes nothing."""

from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from amem_cli.options import Call, command, new_app
from amem_cli.output import digest, human_size, local_time
from kvstore.errors import NotFoundError, UsageError
from kvstore.naming import Ref, parse_digest, parse_ref

if TYPE_CHECKING:
    from amem_cli.usage import AgentUsage, GroupUsage
    from kvstore.history import State
    from kvstore.store import Store

app = new_app()

_SHOWN_POINTS = 8


@command(app)
def inspect(
    call: Call,
    ref: Annotated[str | None, typer.Argument(metavar="REF|DIGEST", help="A state; all agents if left out.")] = None,
) -> None:
    """Show what is stored: all agents, or one state in detail."""
    if ref is None:
        _list(call, call.open_store())
        return
    prefix = parse_digest(ref)
    state = None if prefix else parse_ref(ref)
    store = call.open_store()
    _show(call, store, store.resolve(state) if state else _find(store, prefix or ""))


def _list(call: Call, store: "Store") -> None:
    from amem_cli.usage import measure, total_blocks, total_bytes

    usages, files = measure(store, store.agents())
    for usage in usages:
        call.out.line("agent", **asdict(usage))
    if usages:
        header = ("AGENT", "MODEL", "TOKENS", "SIZE", "OWN", "SNAPS", "UPDATED")
        call.out.table(header, [_row(usage) for usage in usages], right=range(2, 6))
    else:
        call.out.say(f"no agent in {call.root}")
    call.out.say(f"{len(usages)} agents, {human_size(total_bytes(files))} on disk")
    call.out.result(
        call.command,
        agents=len(usages),
        snapshots=sum(usage.snapshots for usage in usages),
        blocks=total_blocks(files),
        bytes=total_bytes(files),
        store=str(call.root),
        store_id=store.id,
    )


def _row(usage: "AgentUsage") -> tuple[str, ...]:
    return (
        usage.name if usage.complete else f"{usage.name} (incomplete)",
        usage.model,
        str(usage.tokens),
        human_size(usage.bytes),
        human_size(usage.own_bytes),
        str(usage.snapshots),
        local_time(usage.updated),
    )


def _find(store: "Store", prefix: str) -> "State":
    """The one state of any agent whose digest begins with `prefix`."""
    found = {}
    for agent in store.agents():
        try:
            state = store.resolve(Ref(agent.name, digest=prefix))
        except NotFoundError:
            continue
        found[state.digest] = state
    if not found:
        raise NotFoundError(f"no agent has a state sha256:{prefix}", "`amem inspect` lists the agents")
    if len(found) > 1:
        raise UsageError(f"sha256:{prefix} is the beginning of {len(found)} states", "give more digits")
    return next(iter(found.values()))


def _show(call: Call, store: "Store", state: "State") -> None:
    from amem_cli.usage import group_usage, measure

    [usage] = [usage for usage in measure(store, store.agents())[0] if usage.id == state.agent.id]
    groups = [group_usage(state.manifest, group) for group in state.manifest.groups]
    call.out.line("agent", **asdict(usage))
    if call.out.json:
        call.out.result(call.command, **_details(store, state, groups))
        return
    _print_state(call, state, usage, groups)
    _print_ways_back(call, store, state)


def _details(store: "Store", state: "State", groups: list["GroupUsage"]) -> dict[str, Any]:
    from kvstore.history import lineage

    manifest = state.manifest
    past = [{"state": digest(at), "tokens": m.tokens, "op": m.op} for at, m in lineage(store, state.agent)]
    snapshots = [
        {"name": snapshot.name, "state": digest(snapshot.manifest), "note": snapshot.note, "created": snapshot.created}
        for snapshot in store.snapshots(state.agent.name)
    ]
    return {
        "ref": str(state.ref),
        "state": digest(state.digest),
        "op": manifest.op,
        "tokens": manifest.tokens,
        "cached": manifest.cached,
        "pending": manifest.pending,
        "owed": len(manifest.owed),
        "complete": manifest.complete,
        "recomputed": manifest.recomputed,
        "turns": len(manifest.turns),
        "stop": manifest.stop,
        "codec": manifest.codec.name,
        "model_parts": manifest.model.parts,
        "groups": [asdict(group) for group in groups],
        "cache_bytes": sum(group.bytes for group in groups),
        "fp16_bytes": sum(group.fp16_bytes for group in groups),
        "snapshots": snapshots,
        "resume_points": past,
    }


def _print_ways_back(call: Call, store: "Store", state: "State") -> None:
    from kvstore.history import lineage

    for snapshot in store.snapshots(state.agent.name):
        note = f"  {snapshot.note}" if snapshot.note else ""
        call.out.print(f"snapshot   {snapshot.agent}@{snapshot.name}  {local_time(snapshot.created)}{note}")
    for at, past in islice(lineage(store, state.agent), _SHOWN_POINTS):
        where = f"{state.agent.name}@sha256:{at[:12]}"
        call.out.print(f"resumes    {where}  {past.tokens} tokens, {past.op}, {local_time(past.created)}")


def _print_state(call: Call, state: "State", usage: "AgentUsage", groups: list["GroupUsage"]) -> None:
    manifest = state.manifest
    parts = ", ".join(f"{name} {value[:12]}" for name, value in manifest.model.parts.items())
    coded, plain = (sum(sizes) for sizes in zip(*((g.bytes, g.fp16_bytes) for g in groups), strict=True))
    unfinished = "" if manifest.complete else ", cut short: prefill it again"
    lines = {
        "state": f"{state.ref}  {digest(state.digest)}",
        "parent": usage.parent or "none",
        "made by": f"{manifest.op}, {local_time(manifest.created)}",
        "domain": usage.domain,
        "model": f"{manifest.model.name} ({parts})",
        "tokens": f"{manifest.tokens}: {manifest.cached} cached, {manifest.pending} pending{unfinished}",
        "turns": f"{len(manifest.turns)}, ended by {manifest.stop or 'nothing'}, {len(manifest.owed)} tokens owed",
        "cache": f"{human_size(coded)} as {manifest.codec.name}; float16 would be {human_size(plain)}",
        "agent": f"{human_size(usage.bytes)} on disk: {human_size(usage.own_bytes)} its own, "
        f"{human_size(usage.shared_bytes)} shared with others",
    }
    for name, text in lines.items():
        call.out.print(f"{name:<10} {text}")
    for group in groups:
        dims = f"{group.layers} layers, {group.kv_heads} KV heads, dims {group.key_dim}/{group.value_dim}"
        window = f", window {group.window}" if group.window else ""
        call.out.print(f"group      {group.id}: {dims}{window}; {group.tokens} tokens, {human_size(group.bytes)}")
