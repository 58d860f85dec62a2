"""`amem log`: the history of an agent, or the journal of the store. Reads small files only, and writes nothing."""

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from amem_cli.shell.options import Call, ShowText, command, new_app
from amem_cli.shell.output import Output, counted, digest, local_time
from amem_cli.shell.quantities import check_time, parse_time
from kvstore.errors import UsageError
from kvstore.format.document import as_dict
from kvstore.naming import check_name

if TYPE_CHECKING:
    from kvstore.commit.journal import Entry
    from kvstore.history.log import Chronicle, Commit
    from kvstore.store import Store

app = new_app()

_DIGITS = 12


def _count(value: int | None) -> int | None:
    if value is not None and value < 1:
        raise UsageError(f"-n must be 1 or more, not {value}")
    return value


Agent = Annotated[str | None, typer.Argument(metavar="AGENT", help="An agent; the store's journal if omitted.")]
Number = Annotated[
    int | None, typer.Option("-n", "--number", metavar="N", callback=_count, help="Only the newest N entries.")
]
Graph = Annotated[bool, typer.Option("--graph", help="Draw all agents of the domain, with their forks.")]
Since = Annotated[
    str | None,
    typer.Option("--since", metavar="TIME", callback=check_time, help="From a time: RFC 3339, or an age such as 2h."),
]
Until = Annotated[str | None, typer.Option("--until", metavar="TIME", callback=check_time, help="Up to a time.")]
Head = Annotated[bool, typer.Option("--head", help="Show the journal's length and digest, to keep elsewhere.")]


@command(app)
def log(
    call: Call,
    agent: Agent = None,
    number: Number = None,
    graph: Graph = False,
    text: ShowText = False,
    since: Since = None,
    until: Until = None,
    head: Head = False,
) -> None:
    """Show an agent's history, newest first; or without AGENT the journal: who changed what, and when."""
    _check(agent, graph=graph, text=text, journal=bool(since or until or head))
    store = call.open_store()
    if agent is None:
        _journal(call, store, number, since, until, head)
    else:
        from kvstore.history.log import Chronicle

        found = store.agent(check_name("agent", agent))
        chronicle = Chronicle(store, found.domain)
        if graph:
            _graph(call, chronicle, agent, number)
        elif text:
            _text(call, store, list(islice(chronicle.commits(found), number)))
        else:
            _history(call, agent, list(islice(chronicle.commits(found), number)))


def _check(agent: str | None, *, graph: bool, text: bool, journal: bool) -> None:
    """Raise UsageError for options that cannot be combined; `journal`: one of those for the journal is given."""
    if graph and text:
        raise UsageError("--graph and --text cannot be combined", "give one of them")
    if agent is None and (graph or text):
        raise UsageError("--graph and --text need an AGENT", "`amem inspect` lists the agents")
    if agent is not None and journal:
        raise UsageError("--since, --until and --head apply to the journal only", "leave AGENT out")


def _fields(commit: "Commit") -> dict[str, Any]:
    manifest = commit.manifest
    return {
        "agent": commit.agent,
        "state": digest(commit.digest),
        "op": manifest.op,
        "created": manifest.created,
        "tokens": manifest.tokens,
        "complete": manifest.complete,
        "previous": digest(manifest.previous),
        "resumes": digest(manifest.resumes),
        "origin": commit.origin,
        "note": commit.note,
        "snapshots": list(commit.snapshots),
        "forks": list(commit.forks),
        "turns": [as_dict(turn) for turn in commit.turns],
        "stop": manifest.stop,
        "sampling": as_dict(manifest.sampling) if manifest.sampling else None,
    }


def _history(call: Call, agent: str, commits: Sequence["Commit"]) -> None:
    for commit in commits:
        call.out.line("commit", **_fields(commit))
        call.out.print(f"{commit.agent}@sha256:{commit.digest[:_DIGITS]}  {_summary(commit)}")
        for turn in commit.turns:
            label = f"  {turn.label}" if turn.label else ""
            call.out.print(f"    {turn.role:<9} tokens {turn.start} to {turn.end}{label}")
        if commit.note:
            call.out.print(f"    note: {commit.note}")
    call.out.result(call.command, agent=agent, commits=len(commits))


def _summary(commit: "Commit") -> str:
    manifest = commit.manifest
    parts = [local_time(manifest.created), manifest.op, counted(manifest.tokens, "token")]
    parts += [f"forked from {commit.origin}"] if commit.origin else []
    parts += [f"@{name}" for name in commit.snapshots]
    parts += [f"forked as {name}" for name in commit.forks]
    parts += [] if manifest.complete else ["incomplete"]
    return "  ".join(parts)


def _graph(call: Call, chronicle: "Chronicle", agent: str, number: int | None) -> None:
    from amem_cli.views.history_graph import Node, draw

    commits = {(commit.agent, commit.digest): commit for commit in chronicle.all()[:number]}
    nodes = [Node(commit.digest, commit.agent, commit.parent) for commit in commits.values()]
    lines = draw(nodes)
    width = max(len(drawn) for drawn, _ in lines)
    for drawn, node in lines:
        if node is None:
            call.out.print(drawn)
            continue
        commit = commits[node.lane, node.id]
        call.out.line("commit", **_fields(commit), graph=drawn)
        call.out.print(f"{drawn:<{width}}  {commit.agent}  {commit.digest[:_DIGITS]}  {_summary(commit)}")
    call.out.result(call.command, agent=agent, commits=len(commits))


def _text(call: Call, store: "Store", commits: Sequence["Commit"]) -> None:
    """The turns of each commit; of a single commit only its last answer, printed without its role."""
    from amem_cli.views.decoded_text import TextDecoder
    from kvstore.history.diff import tokens_from

    decoder = TextDecoder(call)
    for commit in commits:
        manifest = commit.manifest
        tokens = tokens_from(store, manifest, 0)
        answers = [turn for turn in manifest.turns if turn.role == "assistant"]
        for turn in answers[-1:] if len(commits) == 1 else commit.turns:
            decode = decoder.answer if turn.role == "assistant" else decoder.text
            decoded = decode(manifest.model, tokens[turn.start : turn.end])
            call.out.line("text", agent=commit.agent, state=digest(commit.digest), **as_dict(turn), text=decoded)
            call.out.print(decoded if len(commits) == 1 else f"[{turn.role}] {decoded}")
    call.out.result(call.command, agent=commits[0].agent, commits=len(commits))


def _journal(call: Call, store: "Store", number: int | None, since: str | None, until: str | None, head: bool) -> None:
    from kvstore.history.log import journal_between, journal_head

    if head:
        at = journal_head(store.layout.journal)
        shown = f"{counted(at.entries, 'entry', 'entries')}, {counted(at.bytes, 'byte')}, {digest(at.digest)}"
        call.out.result(call.command, shown, entries=at.entries, bytes=at.bytes, digest=digest(at.digest))
        return
    start, end = (parse_time(text) if text else None for text in (since, until))
    names = {agent.id: agent.name for agent in store.agents()}
    entries = journal_between(store.layout.journal, start, end)[:number]
    for entry in entries:
        _print_entry(call.out, entry, names.get(entry.change.agent_id))
    call.out.result(call.command, entries=len(entries))


def _print_entry(out: Output, entry: "Entry", agent: str | None) -> None:
    """A line of the journal; `agent`: the name of its agent, if that still exists."""
    change, actor = entry.change, entry.actor
    values = {**as_dict(change), **as_dict(entry), "agent": agent}
    values |= {"before": digest(change.before), "after": digest(change.after)}
    out.line("entry", **values)
    who = f"{actor.user}@{actor.host}" + (f" as {actor.claimed}" if actor.claimed else "")
    what = f"{change.op} {agent or change.agent_id or change.domain_id}"
    moved = f" to {digest(change.after[:_DIGITS])}" if change.after else ""
    note = f"  {change.note}" if change.note else ""
    out.print(f"{entry.seq:>6}  {local_time(entry.time)}  {who}  {what}{moved}{note}")
