"""`amem verify`: read the store and say what is wrong, whom it hurts, and what is proven. Writes nothing to it."""

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from amem_cli.shell.options import Call, command, new_app
from amem_cli.shell.output import digest, human_size
from kvstore.errors import DamageError, IsolationError, UsageError
from kvstore.naming import check_name, parse_digest

if TYPE_CHECKING:
    from kvstore.store import Store
    from kvstore.verify.checks import Checks, Depth, Report
    from kvstore.verify.findings import Finding

app = new_app()


@command(app)
def verify(
    call: Call,
    agents: Annotated[
        list[str] | None, typer.Argument(metavar="AGENT…", help="Only what these need; all if left out.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only that files are there, in their sizes.")] = False,
    deep: Annotated[bool, typer.Option("--deep", help="Also hold every file against its SHA-256.")] = False,
    isolation: Annotated[bool, typer.Option("--isolation", help="Only that domains and users are kept apart.")] = False,
    journal: Annotated[bool, typer.Option("--journal", help="Only the journal, and the refs against it.")] = False,
    journal_head: Annotated[
        str | None,
        typer.Option(
            "--journal-head", metavar="DIGEST", help="A journal line, from an earlier run, that must be there."
        ),
    ] = None,
    erased: Annotated[
        Path | None, typer.Option("--erased", metavar="FILE", help="Only that what `rm --erase` certified is gone.")
    ] = None,
    sums: Annotated[
        str | None, typer.Option("--sums", metavar="FILE|-", help="Write a list for `sha256sum -c`; with --deep.")
    ] = None,
) -> None:
    """Check every file and say what is proven. --isolation and --journal add to --quick and --deep."""
    from kvstore.verify.verify import verify as check

    if erased is not None and (agents or quick or deep or isolation or journal or journal_head or sums):
        raise UsageError("--erased is a check of its own", "give it without other checks and without agents")
    checks = _checks(agents or [], quick, deep, isolation, journal, journal_head)
    if sums is not None and (checks.depth != "deep" or checks.agents or (sums == "-" and call.out.json)):
        raise UsageError("--sums lists the whole store, with --deep", "give it a FILE beside --json, and no AGENT")
    store = call.open_store()
    if erased is not None:
        _check_erased(call, store, erased)
        return
    report = check(store, checks)
    for finding in report.findings:
        _show(call, finding)
    if sums is not None:
        from kvstore.verify.verify import sums as listed

        _write(call, sums, listed(store.layout))
    _tell(call, report)
    code = _exit_code(report)
    call.out.result(call.command, ok=not code, **_fields(report))
    if code:
        raise typer.Exit(code)


def _show(call: Call, finding: "Finding") -> None:
    call.out.line("finding", **asdict(finding))
    hurt = f"; hurts {', '.join(finding.agents)}" if finding.agents else ""
    call.out.print(f"{finding.severity}: {finding.message}{hurt}")


def _check_erased(call: Call, store: "Store", file: Path) -> None:
    from kvstore.remove.certificate import check_erased, read_certificates
    from kvstore.verify.findings import Finding

    certificates = read_certificates(file.read_bytes())
    remains = [found for certificate in certificates for found in check_erased(store, certificate)]
    for found in remains:
        _show(call, Finding("damage", "erased", found.object, (), f"{found.object} {found.message}"))
    call.out.say(f"{len(certificates)} erasures: {len(remains)} findings")
    checked = sum(len(certificate.erased) for certificate in certificates)
    call.out.result(call.command, ok=not remains, checked=checked, findings=len(remains), store_id=store.id)
    if remains:
        raise typer.Exit(DamageError.exit_code)


def _checks(
    agents: list[str], quick: bool, deep: bool, isolation: bool, journal: bool, journal_head: str | None
) -> "Checks":
    from kvstore.verify.checks import Checks

    if quick and deep:
        raise UsageError("--quick and --deep exclude each other", "give one of them")
    head = parse_digest(journal_head) if journal_head else None
    if journal_head and head is None:
        raise UsageError(f"{journal_head!r} is not a digest", "write sha256: and 4 to 64 hex digits")
    names = tuple(check_name("agent", name) for name in agents)
    depth: Depth = "quick" if quick else "deep" if deep else "checksums"
    if not (quick or deep) and (isolation or journal):
        return Checks(None, isolation, journal or head is not None, head, names)
    return Checks(depth, isolation or not quick, journal or head is not None or not names, head, names)


def _write(call: Call, where: str, lines: Iterable[str]) -> None:
    if where == "-":
        for line in lines:
            call.out.piece(line)
        return
    from kvstore.disk import files

    path = Path(where).absolute()
    files.publish(path, "".join(lines).encode(), path.with_name(f".{path.name}.part"))


def _exit_code(report: "Report") -> int:
    if report.breached:
        return IsolationError.exit_code
    return DamageError.exit_code if report.findings else 0


def _tell(call: Call, report: "Report") -> None:
    call.out.say(f"{report.checked} files, {human_size(report.bytes)}: {len(report.findings)} findings")
    for sentence in report.proven:
        call.out.say(f"proven: {sentence}")
    for sentence in report.not_proven:
        call.out.say(f"not proven: {sentence}")
    if report.journal_head:
        call.out.say(f"journal head: {digest(report.journal_head)}, {report.journal_lines} lines")
    if report.breached:
        call.out.warn("do not use this store: something of one domain or user is within another's reach")
    elif agents := sorted({name for finding in report.findings for name in finding.agents}):
        call.out.warn(f"to compute again what is damaged: amem repair {' '.join(agents)}")


def _fields(report: "Report") -> dict[str, object]:
    return {
        "checked": report.checked,
        "bytes": report.bytes,
        "findings": len(report.findings),
        "proven": report.proven,
        "not_proven": report.not_proven,
        "store_id": report.store_id,
        "started": report.started,
        "finished": report.finished,
        "objects_digest": digest(report.objects_digest),
        "journal_lines": report.journal_lines,
        "journal_head": digest(report.journal_head),
    }
