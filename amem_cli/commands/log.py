"""`amem log`: what happened to an agent, or to the store. Reads small files only, and writes nothing."""

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from amem_cli.shell.options import Call, command, new_app
from amem_cli.shell.output import digest, local_time
from kvstore.errors import UsageError
from kvstore.format.document import as_dict
from kvstore.naming import check_name

if TYPE_CHECKING:
    from kvstore.history.log import Chronicle, Commit
    from kvstore.store import Store

app = new_app()

_DIGITS = 12


def _count(value: int | None) -> int | None:
    if value is not None and value < 1:
        raise UsageError(f"-n {value} is not a number of entries", "give 1 or more")
    return value


@command(app)
def log(
    call: Call,
    agent: Annotated[
        str | None, typer.Argument(metavar="AGENT", help="An agent; the store's journal if left out.")
    ] = None,
    number: Annotated[
        int | None, typer.Option("-n", "--number", metavar="N", callback=_count, help="The newest N entries only.")
    ] = None,
    graph: Annotated[bool, typer.Option("--graph", help="All agents of the domain, and where they fork.")] = False,
    text: Annotated[bool, typer.Option("--text", help="What was said, decoded by the model's tokenizer.")] = False,
    since: Annotated[
        str | None, typer.Option("--since", metavar="TIME", help="From then on: RFC 3339, or an age such as 2h.")
    ] = None,
    until: Annotated[str | None, typer.Option("--until", metavar="TIME", help="Up to then.")] = None,
    head: Annotated[bool, typer.Option("--head", help="The journal's size and digest, to be kept elsewhere.")] = False,
) -> None:
    """Show an agent's history, newest first; without an agent the journal: who changed what, and when."""
    _check(agent, graph and text, graph or text, bool(since or until or head))
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


def _check(agent: str | None, both: bool, of_agent: bool, of_journal: bool) -> None:
    if both:
        raise UsageError("--graph and --text do not go together", "take one of them")
    if agent is None and of_agent:
        raise UsageError("--graph and --text need an agent", "`amem inspect` lists the agents")
    if agent is not None and of_journal:
        raise UsageError("--since, --until and --head are about the journal", "leave the agent out")


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
    parts = [local_time(manifest.created), manifest.op, f"{manifest.tokens} tokens"]
    parts += [f"from {commit.origin}"] if commit.origin else []
    parts += [f"@{name}" for name in commit.snapshots]
    parts += [f"forked as {name}" for name in commit.forks]
    parts += [] if manifest.complete else ["cut short"]
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
    """The turns of each commit; of a single one its last answer alone, which is then all that is printed."""
    from amem_cli.views.text import Decoder
    from kvstore.history.diff import tokens_from

    decoder = Decoder(call)
    for commit in commits:
        manifest = commit.manifest
        tokens = tokens_from(store, manifest, 0)
        answers = [turn for turn in manifest.turns if turn.role == "assistant"]
        for turn in answers[-1:] if len(commits) == 1 else commit.turns:
            decode = decoder.answer if turn.role == "assistant" else decoder.text
            said = decode(manifest.model, tokens[turn.start : turn.end])
            call.out.line("text", agent=commit.agent, state=digest(commit.digest), **as_dict(turn), text=said)
            call.out.print(said if len(commits) == 1 else f"[{turn.role}] {said}")
    call.out.result(call.command, agent=commits[0].agent, commits=len(commits))


def _journal(call: Call, store: "Store", number: int | None, since: str | None, until: str | None, head: bool) -> None:
    from amem_cli.shell.when import parse_time
    from kvstore.history.log import journal_between, journal_head

    if head:
        at = journal_head(store.layout.journal)
        shown = f"{at.entries} entries, {at.bytes} bytes, {digest(at.digest)}"
        call.out.result(call.command, shown, entries=at.entries, bytes=at.bytes, digest=digest(at.digest))
        return
    start, end = (parse_time(text) if text else None for text in (since, until))
    names = {agent.id: agent.name for agent in store.agents()}
    entries = journal_between(store.layout.journal, start, end)[:number]
    for entry in entries:
        change, actor = entry.change, entry.actor
        name = names.get(change.agent_id)
        values = {**as_dict(entry), "agent": name}
        values |= {"before": digest(change.before), "after": digest(change.after)}
        call.out.line("entry", **values)
        who = f"{actor.user}@{actor.host}" + (f" as {actor.claimed}" if actor.claimed else "")
        what = f"{change.op} {name or change.agent_id or change.domain_id}"
        moved = f" to {digest(change.after[:_DIGITS])}" if change.after else ""
        note = f"  {change.note}" if change.note else ""
        call.out.print(f"{entry.seq:>6}  {local_time(entry.time)}  {who}  {what}{moved}{note}")
    call.out.result(call.command, entries=len(entries))
