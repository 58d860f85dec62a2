"""`amem verify`: read the store; report damage, the affected agents, and what is proven. Writes nothing to it."""

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from amem_cli.shell.options import Call, command, new_app
from amem_cli.shell.output import counted, digest, human_size
from kvstore.errors import DamageError, IsolationError, UsageError
from kvstore.naming import check_name, parse_digest

if TYPE_CHECKING:
    from kvstore.store import Store
    from kvstore.verify.checks import Checks, Depth, Report
    from kvstore.verify.findings import Finding

app = new_app()


Agents = Annotated[list[str] | None, typer.Argument(metavar="AGENT…", help="Check only what these agents need.")]
Quick = Annotated[bool, typer.Option("--quick", help="Check only that files exist with their sizes.")]
Deep = Annotated[bool, typer.Option("--deep", help="Also check every file against its SHA-256.")]
Isolation = Annotated[bool, typer.Option("--isolation", help="Check only that domains and users are kept apart.")]
Journal = Annotated[bool, typer.Option("--journal", help="Check only the journal, and the refs against it.")]
JournalHead = Annotated[
    str | None,
    typer.Option("--journal-head", metavar="DIGEST", help="A line of an earlier run that the journal must have."),
]
Erased = Annotated[
    Path | None, typer.Option("--erased", metavar="FILE", help="Check only that what `rm --erase` certified is gone.")
]
Sums = Annotated[
    str | None, typer.Option("--sums", metavar="FILE|-", help="Write a list for `sha256sum -c`; needs --deep.")
]


@command(app)
def verify(
    call: Call,
    agents: Agents = None,
    quick: Quick = False,
    deep: Deep = False,
    isolation: Isolation = False,
    journal: Journal = False,
    journal_head: JournalHead = None,
    erased: Erased = None,
    sums: Sums = None,
) -> None:
    """Check every file and report what is proven. With --quick or --deep, --isolation and --journal are added."""
    from kvstore.verify.verify import verify as check

    if erased is not None:
        if agents or quick or deep or isolation or journal or journal_head or sums:
            raise UsageError("--erased cannot be combined with agents or other checks", "run it on its own")
        _check_erased(call, call.open_store(), erased)
        return
    checks = _checks(agents or [], quick, deep, isolation, journal, journal_head)
    if sums is not None and (checks.depth != "deep" or checks.agents or (sums == "-" and call.out.json)):
        raise UsageError("--sums needs --deep and the whole store", "leave AGENT out; with --json, write to a FILE")
    store = call.open_store()
    report = check(store, checks)
    for finding in report.findings:
        _print_finding(call, finding)
    if sums is not None:
        from kvstore.verify.verify import sums as listed

        _write_sums(call, sums, listed(store.layout))
    _print_report(call, report)
    code = _exit_code(report)
    call.out.result(call.command, ok=not code, **_fields(report))
    if code:
        raise typer.Exit(code)


def _print_finding(call: Call, finding: "Finding") -> None:
    call.out.line("finding", **asdict(finding))
    affected = f"; affects {', '.join(finding.agents)}" if finding.agents else ""
    call.out.print(f"{finding.severity}: {finding.message}{affected}")


def _check_erased(call: Call, store: "Store", file: Path) -> None:
    from kvstore.remove.certificate import check_erased, read_certificates
    from kvstore.verify.findings import Finding

    certificates = read_certificates(file.read_bytes())
    remains = [found for certificate in certificates for found in check_erased(store, certificate)]
    for found in remains:
        _print_finding(call, Finding("damage", "erased", found.object, (), f"{found.object} {found.message}"))
    call.out.info(f"{counted(len(certificates), 'certificate')}: {counted(len(remains), 'finding')}")
    checked = sum(len(certificate.erased) for certificate in certificates)
    call.out.result(call.command, ok=not remains, checked=checked, findings=len(remains), store_id=store.id)
    if remains:
        raise typer.Exit(DamageError.exit_code)


def _checks(
    agents: list[str], quick: bool, deep: bool, isolation: bool, journal: bool, journal_head: str | None
) -> "Checks":
    from kvstore.verify.checks import Checks

    if quick and deep:
        raise UsageError("--quick and --deep cannot be combined", "give one of them")
    head = parse_digest(journal_head) if journal_head else None
    if journal_head and head is None:
        raise UsageError(f"{journal_head!r} is not a digest", "write sha256: and 4 to 64 hex digits")
    names = tuple(check_name("agent", name) for name in agents)
    depth: Depth = "quick" if quick else "deep" if deep else "checksums"
    if not (quick or deep) and (isolation or journal):
        return Checks(None, isolation, journal or head is not None, head, names)
    return Checks(depth, isolation or not quick, journal or head is not None or not names, head, names)


def _write_sums(call: Call, where: str, lines: Iterable[str]) -> None:
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


def _print_report(call: Call, report: "Report") -> None:
    call.out.info(
        f"{counted(report.checked, 'file')}, {human_size(report.bytes)}: {counted(len(report.findings), 'finding')}"
    )
    for sentence in report.proven:
        call.out.info(f"proven: {sentence}")
    for sentence in report.not_proven:
        call.out.info(f"not proven: {sentence}")
    if report.journal_head:
        call.out.info(f"journal head: {digest(report.journal_head)}, {counted(report.journal_lines, 'line')}")
    if report.breached:
        call.out.warn("do not use this store: data of one domain or user is accessible to another")
    elif agents := sorted({name for finding in report.findings for name in finding.agents}):
        call.out.warn(f"recompute the damaged blocks with: amem repair {' '.join(agents)}")


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
