"""`amem gc`: delete what nothing leads to any more; on request evict agents until the store is small enough."""

from collections import defaultdict
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from amem_cli.shell.options import Call, command, new_app
from amem_cli.shell.output import digest, human_size
from amem_cli.shell.units import check_age, check_size, parse_age, parse_size
from kvstore.errors import PartialError

if TYPE_CHECKING:
    from kvstore.gc.collect import GCResult
    from kvstore.gc.report import Collected

app = new_app()

_WHY = {
    "history": "states before those that are kept",
    "evicted": "what evicted agents had",
    "removed": "what removed agents had",
    "unnamed": "left by a commit that was cut off",
    "dead-writer": "left by a command that was killed",
    "empty": "domains without agents",
}


@command(app)
def gc(
    call: Call,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and change nothing.")] = False,
    max_bytes: Annotated[
        str | None,
        typer.Option(
            "--max-bytes", metavar="SIZE", callback=check_size, help="Evict the least recently used until it fits."
        ),
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option(
            "--older-than", metavar="AGE", callback=check_age, help="Evict agents not used for so long: 12h, 30d."
        ),
    ] = None,
    keep_history: Annotated[
        int, typer.Option("--keep-history", metavar="N", min=0, help="Earlier states of each agent to keep.")
    ] = 10,
) -> None:
    """Delete what no agent, snapshot or kept state needs. An evicted agent keeps its tokens, and prefills again."""
    from kvstore.gc.collect import Policy, collect

    limit = None if max_bytes is None else parse_size(max_bytes)
    age = None if older_than is None else parse_age(older_than)
    done = collect(call.open_store(), Policy(keep_history, limit, age), dry_run)
    for found in done.collected:
        _line(call, found)
    _tell(call, done)
    call.out.result(
        call.command,
        ok=done.complete,
        freed_bytes=done.freed_bytes,
        freed_objects=done.freed_objects,
        kept_bytes=done.kept_bytes,
        kept_objects=done.kept_objects,
        evicted=list(done.evicted),
        failed=len(done.failed),
        over_limit_bytes=done.over_limit,
        journaled=done.journaled,
        dry_run=done.dry_run,
    )
    if not done.complete:
        raise typer.Exit(PartialError.exit_code)


def _line(call: Call, found: "Collected") -> None:
    is_digest = found.kind in ("block", "tail", "page", "manifest")
    call.out.line("object", **asdict(found), digest=digest(found.name) if is_digest else None)


def _tell(call: Call, done: "GCResult") -> None:
    would = "would be " if done.dry_run else ""
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for found in done.collected:
        if found.action == "deleted":
            groups[", ".join(found.agents) or "-", found.reason].append(found.bytes)
        elif found.action == "evicted":
            held = f"; the rest is held by {', '.join(found.held_by)}" if found.held_by else ""
            call.out.say(f"agent {found.name} {would}evicted: {human_size(found.bytes)} that only it holds{held}")
        elif found.action == "failed":
            call.out.warn(f"{found.kind} {found.name} is still there: {found.reason}")
        elif found.reason == "foreign":
            call.out.warn(f"{found.name} is no part of a store, and stays")
    if groups:
        rows = [
            (agents, _WHY[reason], str(len(sizes)), human_size(sum(sizes)))
            for (agents, reason), sizes in sorted(groups.items())
        ]
        call.out.table(("AGENTS", "WHAT", "FILES", "SIZE"), rows, right=(2, 3))
    call.out.say(
        f"{human_size(done.freed_bytes)} in {done.freed_objects} objects {would}freed; "
        f"{human_size(done.kept_bytes)} in {done.kept_objects} stay"
    )
    if done.over_limit:
        call.out.warn(f"{human_size(done.over_limit)} too much: snapshots, busy agents and tokens are never evicted")
    if done.freed_bytes and not (done.journaled or done.dry_run):
        call.out.warn("there was no space to tell the journal")
