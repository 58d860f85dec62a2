"""`amem inspect`: agents, states and files of the store. Reads small files only, takes no lock and writes nothing."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from amem_cli.shell.options import Call, ShowText, command, new_app
from amem_cli.shell.output import counted, digest, human_size, local_time
from kvstore.errors import NotFoundError, UsageError
from kvstore.format.document import as_dict
from kvstore.naming import check_name, parse_digest, parse_ref

if TYPE_CHECKING:
    from amem_cli.views.disk_usage import AgentUsage, GroupUsage
    from kvstore.format.records import Domain
    from kvstore.history.resolve import State
    from kvstore.store import Store

app = new_app()

_SHOWN_POINTS = 8
_DIGITS = 12
_ENDINGS = {
    None: "complete",
    "stop": "complete",
    "length": "last answer ended by --max-tokens",
    "interrupted": "last answer interrupted",
}


RefOrDigest = Annotated[
    str | None, typer.Argument(metavar="REF|DIGEST", help="A state, or sha256:PREFIX; all agents if omitted.")
]
DomainName = Annotated[str | None, typer.Option("--domain", metavar="D", help="Show only what is in this domain.")]
RawText = Annotated[bool, typer.Option("--raw", help="With --text: the exact prompt, with control tokens.")]


@command(app)
def inspect(
    call: Call, ref: RefOrDigest = None, domain: DomainName = None, text: ShowText = False, raw: RawText = False
) -> None:
    """Show all agents, one state, or the file with a digest."""
    if (text and ref is None) or (raw and not text):
        raise UsageError("no text to show", "--text needs a REF, and --raw needs --text")
    prefix = parse_digest(ref) if ref else None
    wanted = parse_ref(ref) if ref and prefix is None else None
    name = None if domain is None else check_name("domain", domain)
    store = call.open_store()
    within = None if name is None else _domain(store, name)
    if wanted is not None:
        _state(call, store, store.resolve(wanted), within, text, raw)
    elif prefix is not None:
        _digest(call, store, prefix, within, text, raw)
    else:
        _list(call, store, within)


def _domain(store: "Store", name: str) -> "Domain":
    """The domain of that name or id. Raises NotFoundError."""
    return next((domain for domain in store.domains() if domain.id == name), None) or store.domain_named(name)


def _list(call: Call, store: "Store", within: "Domain | None") -> None:
    from amem_cli.views.disk_usage import Usage, total_blocks, total_bytes

    agents = [agent for agent in store.agents() if within is None or agent.domain == within.id]
    usage = Usage(store, agents)
    usages = [usage.agent(agent) for agent in agents]
    for one in usages:
        call.out.line("agent", **one._asdict())
    where = f"domain {within.name or within.id}" if within else str(call.root)
    if usages:
        header = ("AGENT", "MODEL", "TOKENS", "SIZE", "OWN", "SNAPS", "UPDATED")
        call.out.table(header, [_row(one) for one in usages], right=range(2, 6))
    else:
        call.out.info(f"no agents in {where}")
    size = total_bytes(usage.files)
    call.out.info(f"{counted(len(usages), 'agent')}, {human_size(size)} on disk")
    call.out.result(
        call.command,
        agents=len(usages),
        snapshots=usage.snapshots,
        blocks=total_blocks(usage.files),
        bytes=size,
        store=str(call.root),
        store_id=store.id,
        domain=within and {"id": within.id, "name": within.name, "created": within.created},
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


def _digest(call: Call, store: "Store", prefix: str, within: "Domain | None", text: bool, raw: bool) -> None:
    from amem_cli.views.object_details import details, find, state_of

    found = find(store, prefix, within.id if within else None)
    state = state_of(store, found)
    if state is not None:
        _state(call, store, state, within, text, raw)
        return
    if text:
        raise UsageError(f"{found.object} is not a state of an agent", "--text needs a REF")
    values = details(store, found)
    shown = {**values, "bytes": human_size(values["bytes"]), "held_by": ", ".join(values["held_by"]) or "none"}
    _print_lines(call, {key.replace("_", " "): str(value) for key, value in shown.items()}.items())
    call.out.result(call.command, **values)


def _state(call: Call, store: "Store", state: "State", within: "Domain | None", text: bool, raw: bool) -> None:
    if within is not None and state.agent.domain != within.id:
        where = within.name or within.id
        raise NotFoundError(f"agent {state.agent.name} is not in domain {where}", "leave --domain out")
    if text:
        _text(call, store, state, raw)
        return
    from amem_cli.views.disk_usage import Usage, group_usage

    usage = Usage(store, [agent for agent in store.agents() if agent.domain == state.agent.domain])
    agent = usage.agent(state.agent)
    files = usage.files_of(state.agent.domain, state.digest)
    size, shared = sum(file.bytes for file in files.values()), usage.shared_bytes(files, state.agent)
    groups = [group_usage(state.manifest, group) for group in state.manifest.groups]
    values = {**_details(store, state, groups), "bytes": size, "own_bytes": size - shared, "shared_bytes": shared}
    call.out.line("agent", **agent._asdict())
    _print_lines(call, _summary(state, agent, values))
    _print_lines(call, _model_lines(values, groups))
    _print_lines(call, _resume_lines(values))
    call.out.result(call.command, **values)


def _text(call: Call, store: "Store", state: "State", raw: bool) -> None:
    """The conversation, turn by turn, or the exact prompt."""
    from amem_cli.views.decoded_text import TextDecoder
    from kvstore.history.diff import tokens_from

    decoder, manifest = TextDecoder(call), state.manifest
    tokens = tokens_from(store, manifest, 0)
    values: dict[str, Any] = {"ref": str(state.ref), "state": digest(state.digest), "tokens": manifest.tokens}
    if raw:
        prompt = decoder.text(manifest.model, tokens)
        call.out.result(call.command, prompt, **values, text=prompt)
        return
    for turn in manifest.turns:
        decoded = decoder.turn_text(manifest.model, turn.role, tokens[turn.start : turn.end])
        call.out.line("text", agent=state.agent.name, state=digest(state.digest), **as_dict(turn), text=decoded)
        call.out.print(f"[{turn.role}] {decoded}")
    call.out.result(call.command, **values, turns=len(manifest.turns))


def _details(store: "Store", state: "State", groups: list["GroupUsage"]) -> dict[str, Any]:
    from kvstore.history.resolve import lineage

    manifest = state.manifest
    past = [
        {"state": digest(at), "tokens": m.tokens, "op": m.op, "created": m.created}
        for at, m in lineage(store, state.agent)
    ]
    snapshots = [
        {"name": snapshot.name, "state": digest(snapshot.manifest), "note": snapshot.note, "created": snapshot.created}
        for snapshot in store.snapshots(state.agent.name)
    ]
    return {
        "ref": str(state.ref),
        "agent": state.agent.name,
        "state": digest(state.digest),
        "op": manifest.op,
        "created": manifest.created,
        "tokens": manifest.tokens,
        "cached": manifest.cached,
        "pending": manifest.pending,
        "owed": len(manifest.owed),
        "complete": manifest.complete,
        "recomputed": manifest.recomputed,
        "turns": len(manifest.turns),
        "stop": manifest.stop,
        "codec": manifest.codec.name,
        "model": manifest.model.name,
        "model_parts": manifest.model.parts,
        "groups": [group._asdict() for group in groups],
        "cache_bytes": sum(group.bytes for group in groups),
        "fp16_bytes": sum(group.fp16_bytes for group in groups),
        "snapshots": snapshots,
        "resume_points": past,
    }


Lines = Iterator[tuple[str, str]]  # a label ("": as the line before) and its text


def _print_lines(call: Call, lines: Iterable[tuple[str, str]]) -> None:
    for name, text in lines:
        call.out.print(f"{name:<10} {text}")


def _summary(state: "State", usage: "AgentUsage", values: dict[str, Any]) -> Lines:
    yield "state", str(state.ref)
    yield "digest", values["state"]
    yield "parent", digest(state.manifest.previous or state.manifest.resumes) or "none"
    yield "created by", f"{values['op']}, {local_time(values['created'])}"
    yield "domain", usage.domain
    yield "tokens", f"{values['tokens']}: {values['cached']} cached, {values['pending']} pending"
    if not values["complete"]:
        yield "", "incomplete: run the same prefill to continue"
    if values["recomputed"]:
        yield "", "cache recomputed from tokens"
    yield "turns", f"{values['turns']}, {_ENDINGS[values['stop']]}"
    if values["owed"]:
        yield "", f"{counted(values['owed'], 'closing token')} added by the next turn"
    yield "cache", f"{human_size(values['cache_bytes'])} as {values['codec']}"
    yield "", f"{human_size(values['fp16_bytes'])} in float16"
    yield "on disk", f"{human_size(values['bytes'])}: {human_size(values['own_bytes'])} of its own,"
    yield "", f"{human_size(values['shared_bytes'])} shared with other agents"


def _model_lines(values: dict[str, Any], groups: list["GroupUsage"]) -> Lines:
    yield "model", values["model"]
    for name, part in values["model_parts"].items():
        yield "", f"{name} {part[:_DIGITS]}"
    for group in groups:
        yield "group", f"{group.id}: {counted(group.layers, 'layer')}, {counted(group.kv_heads, 'KV head')}"
        window = f", window {group.window}" if group.window else ""
        yield "", f"dims {group.key_dim}/{group.value_dim}{window}"
        yield "", f"{counted(group.tokens, 'token')}, {human_size(group.bytes)}"


def _resume_lines(values: dict[str, Any]) -> Lines:
    name = values["agent"]
    for snapshot in values["snapshots"]:
        yield "snapshot", f"{name}@{snapshot['name']}  {local_time(snapshot['created'])}"
        if snapshot["note"]:
            yield "", snapshot["note"]
    for point in islice(values["resume_points"], _SHOWN_POINTS):
        yield "resume at", f"{name}@{point['state'][: len('sha256:') + _DIGITS]}"
        yield "", f"{counted(point['tokens'], 'token')}, {point['op']}, {local_time(point['created'])}"
