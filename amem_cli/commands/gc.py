"""`amem gc`: delete unreachable files; on request evict agents until the store is small enough."""

from collections import defaultdict
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from amem_cli.shell.options import Call, DryRun, command, new_app
from amem_cli.shell.output import Output, counted, digest, human_size
from amem_cli.shell.quantities import check_age, check_size, parse_age, parse_size
from kvstore.errors import PartialError
from kvstore.format.kinds import kind_named

if TYPE_CHECKING:
    from kvstore.gc.collect import GCResult
    from kvstore.gc.report import Collected

app = new_app()

MaxBytes = Annotated[
    str | None,
    typer.Option("--max-bytes", metavar="SIZE", callback=check_size, help="Evict the least recently used to fit."),
]
OlderThan = Annotated[
    str | None,
    typer.Option("--older-than", metavar="AGE", callback=check_age, help="Evict agents unused for longer: 12h, 30d."),
]
KeepHistory = Annotated[
    int, typer.Option("--keep-history", metavar="N", min=0, help="Earlier states to keep of each agent.")
]

_REASONS = {
    "history": "states older than the kept history",
    "evicted": "caches of evicted agents",
    "removed": "files of removed agents",
    "unnamed": "left by an interrupted commit",
    "dead-writer": "left by a killed command",
    "empty": "domains without agents",
}


@command(app)
def gc(
    call: Call,
    dry_run: DryRun = False,
    max_bytes: MaxBytes = None,
    older_than: OlderThan = None,
    keep_history: KeepHistory = 10,
) -> None:
    """Delete files that no agent, snapshot or kept state needs. Evicted agents keep their tokens and prefill again."""
    from kvstore.gc.collect import Policy, collect

    limit = None if max_bytes is None else parse_size(max_bytes)
    age = None if older_than is None else parse_age(older_than)
    done = collect(call.open_store(), Policy(keep_history, limit, age), dry_run)
    for found in done.collected:
        call.out.line("object", **asdict(found), digest=digest(found.name) if kind_named(found.kind) else None)
    _print(call.out, done)
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


def _print(out: Output, done: "GCResult") -> None:
    would_be = "would be " if done.dry_run else ""
    for found in done.collected:
        if found.action == "evicted":
            shared = f"; the rest is shared with {', '.join(found.held_by)}" if found.held_by else ""
            out.info(f"agent {found.name} {would_be}evicted: {human_size(found.bytes)} of its own{shared}")
        elif found.action == "failed":
            verb = "evicted" if found.kind == "agent" else "deleted"
            out.warn(f"{found.kind} {found.name} could not be {verb}: {found.reason}")
        elif found.reason == "foreign":
            out.warn(f"{found.name} does not belong to the store; left in place")
    _print_deleted(out, done)
    freed = f"{counted(done.freed_objects, 'object')} ({human_size(done.freed_bytes)}) {would_be}freed"
    out.info(f"{freed}, {done.kept_objects} ({human_size(done.kept_bytes)}) kept")
    if done.over_limit:
        too_much = f"{human_size(done.over_limit)} over --max-bytes"
        out.warn(f"{too_much}: snapshots, busy agents and tokens are never evicted")
    if done.freed_bytes and not (done.journaled or done.dry_run):
        out.warn("the disk was too full to record this in the journal")


def _print_deleted(out: Output, done: "GCResult") -> None:
    """A table of what was deleted, by agents and reason."""
    deleted: defaultdict[tuple[str, str], list[Collected]] = defaultdict(list)
    for found in done.collected:
        if found.action == "deleted":
            deleted[", ".join(found.agents) or "-", found.reason].append(found)
    rows = [
        (agents, _REASONS[reason], str(len(files)), human_size(sum(file.bytes for file in files)))
        for (agents, reason), files in sorted(deleted.items())
    ]
    if rows:
        out.table(("AGENTS", "WHAT", "FILES", "SIZE"), rows, right=(2, 3))
