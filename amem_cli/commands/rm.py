"""`amem rm`: remove agents, snapshots and domains; with --erase delete their bytes at once and certify it."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from amem_cli.shell.options import DEFAULT_WAIT, Call, DryRun, Wait, command, new_app
from amem_cli.shell.output import counted, human_size
from kvstore.errors import AmemError, DamageError, IsolationError, PartialError, UsageError
from kvstore.naming import Ref, check_name, parse_ref

if TYPE_CHECKING:
    from kvstore.remove.remove import Action, Removal, Removed
    from kvstore.store import Store

app = new_app()

Refs = Annotated[list[str] | None, typer.Argument(metavar="REF…", help="Agents, or snapshots AGENT@NAME.")]
DomainName = Annotated[
    str | None, typer.Option("--domain", metavar="D", help="Remove a domain, by name or id, with all its agents.")
]
Erase = Annotated[bool, typer.Option("--erase", help="Delete the bytes now and print a certificate.")]

_MEANINGS: "dict[Action, str]" = {"erased": "erased", "left": "left for the next gc", "kept": "kept"}


@command(app)
def rm(
    call: Call,
    refs: Refs = None,
    domain: DomainName = None,
    erase: Erase = False,
    dry_run: DryRun = False,
    wait: Wait = DEFAULT_WAIT,
) -> None:
    """Remove agents, snapshots or a domain. The next gc deletes the bytes, or --erase at once."""
    if bool(refs) == (domain is not None):
        raise UsageError("rm takes either REFs or --domain", "give agents and snapshots, or one --domain D")
    wanted: list[Ref | str] = [*map(parse_ref, refs or ())] if domain is None else [check_name("domain", domain)]
    store = call.open_store()
    done, failures = [], []
    for what in dict.fromkeys(wanted):
        try:
            done.append(_remove(store, what, wait, erase, dry_run))
        except AmemError as error:
            if len(wanted) == 1:
                raise
            failures.append(error)
            _print_failure(call, what, error)
            continue
        _print(call, done[-1])
    code = _exit_code(done, failures, erase and not dry_run)
    call.out.result(call.command, _certificates(done), ok=code == 0, **_figures(done, len(failures), dry_run))
    if code:
        raise typer.Exit(code)


def _remove(store: "Store", what: Ref | str, wait: float, erase: bool, dry_run: bool) -> "Removal":
    from kvstore.remove.remove import remove, remove_domain

    if isinstance(what, str):
        return remove_domain(store, what, wait, erase=erase, dry_run=dry_run)
    return remove(store, what, wait, erase=erase, dry_run=dry_run)


def _exit_code(done: list["Removal"], failures: list[AmemError], erasing: bool) -> int:
    for kind in (IsolationError, DamageError):
        if any(isinstance(error, kind) for error in failures):
            return kind.exit_code
    partial = bool(failures) or (erasing and bool(_remaining(done)))
    return PartialError.exit_code if partial else 0


def _remaining(done: list["Removal"]) -> "list[Removed]":
    """What was not erased. What one removal had to keep, a later one may have erased."""
    objects = [found for removal in done for found in removal.objects]
    gone = {(found.kind, found.name) for found in objects if found.action == "erased"}
    remaining = [found for found in objects if found.action in ("kept", "failed")]
    return [found for found in remaining if found.action == "failed" or (found.kind, found.name) not in gone]


def _print_failure(call: Call, what: Ref | str, error: AmemError) -> None:
    call.out.warn(f"{what} was not removed: {error.message}")
    call.out.line("failed", ref=str(what), code=error.code, exit=error.exit_code, message=error.message)


def _print(call: Call, removal: "Removal") -> None:
    for found in removal.objects:
        call.out.line("object", **asdict(found), dry_run=removal.dry_run)
        if found.action == "failed":
            call.out.warn(f"{found.kind} {found.name} could not be deleted: {found.reason}")
    would_be = "would be " if removal.dry_run else ""
    for action, meaning in _MEANINGS.items():
        files = [found for found in removal.objects if found.action == action and found.bytes]
        if files:
            holders = sorted({holder for found in files for holder in found.held_by})
            needed = f", needed by {', '.join(holders)}" if holders else ""
            size = human_size(removal.bytes_of(action))
            call.out.info(f"{removal.what}: {counted(len(files), 'file')}, {size} {would_be}{meaning}{needed}")


def _certificates(done: list["Removal"]) -> str | None:
    found = [json.dumps(removal.certificate.document()) for removal in done if removal.certificate]
    return "\n".join(found) if found else None


def _figures(done: list["Removal"], failures: int, dry_run: bool) -> dict[str, Any]:
    erased = [found for removal in done for found in removal.objects if found.action == "erased"]
    return {
        "removed": [removal.what for removal in done],
        "failed": failures,
        "freed_bytes": sum(found.bytes for found in erased),
        "freed_objects": sum(found.bytes > 0 for found in erased),
        "left_bytes": sum(removal.bytes_of("left") for removal in done),
        "kept_objects": len(_remaining(done)),
        "dry_run": dry_run,
        "certificates": [removal.certificate.document() for removal in done if removal.certificate],
    }
