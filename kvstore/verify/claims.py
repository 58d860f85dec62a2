"""What a verification proves, and what it does not: plain sentences for its readers."""

from collections.abc import Sequence

from kvstore.verify.checks import Checks
from kvstore.verify.findings import ISOLATION, Finding

_ACCIDENTS = "That no file was forged: xxh3 finds accidents only; --deep reads every file's SHA-256."
_ALWAYS_OPEN = (
    "That these are the same objects as before: compare objects_digest with that of an earlier run.",
    "That the stored KV is what the model computes: `amem repair` computes it again.",
)


def claims(checks: Checks, findings: Sequence[Finding], index_read: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What is proven, and what is not. A claim that a finding contradicts is not proven."""
    kinds = {finding.kind for finding in findings}
    proven: list[str] = []
    open_: list[str] = []
    (open_ if kinds - ISOLATION - {"journal"} else proven).extend(_of_states(checks))
    if checks.isolation:
        (open_ if kinds & ISOLATION else proven).extend(_of_isolation(checks))
    if checks.journal:
        (open_ if "journal" in kinds else proven).extend(_of_journal(checks))
    return tuple(proven), (*open_, *_not_looked_at(checks, index_read), *_ALWAYS_OPEN)


def _of_states(checks: Checks) -> list[str]:
    if checks.depth is None:
        return []
    whose = "the agents named" if checks.agents else "every agent, snapshot and kept earlier state"
    found = [
        f"All files that {whose} need exist and have their sizes.",
        "Their manifests and pages have the SHA-256 that names them, and list all tokens and blocks without a gap.",
    ]
    if checks.depth != "quick":
        found.append("Every block and tail has its checksum (xxh3-64), its parts and its tokens.")
        found.append("Every prefix key is that of its domain, model, codec and tokens.")
    if checks.depth == "deep":
        found.append("Every block and tail has the SHA-256 that names it.")
    if not checks.agents:
        found.append("The store holds nothing else.")
    return found


def _of_isolation(checks: Checks) -> list[str]:
    found = ["Every file names the domain it is in, and has that domain's salt."]
    if not checks.agents:
        found.append("No two domains share a salt or a digest; no staged file and no row of the index crosses domains.")
        found.append(
            "Only the store's owner can read it: modes are 0700, 0600 and 0400, and no file has a second link."
        )
    return found


def _of_journal(checks: Checks) -> list[str]:
    found = ["Each line of the journal holds the SHA-256 of the one before; all heads and snapshots are what it says."]
    if checks.journal_head:
        found.append("The given line is in it: nothing before it was cut off or changed.")
    return found


def _not_looked_at(checks: Checks, index_read: bool) -> list[str]:
    missing = []
    if checks.depth is None:
        missing.append("That the agents' files exist and are whole: states were not checked.")
    elif checks.depth == "quick":
        missing.append("That blocks and tails have the right content: it was not read.")
    elif checks.depth == "checksums":
        missing.append(_ACCIDENTS)
    if not checks.isolation:
        missing.append("That domains are kept apart: --isolation checks that.")
    elif not index_read and not checks.agents:
        missing.append("That no row of the index crosses domains: it could not be read.")
    if not checks.journal:
        missing.append("That the journal is whole: --journal checks that.")
    elif not checks.journal_head:
        missing.append(
            "That no last lines of the journal were cut off with their refs: --journal-head DIGEST shows that."
        )
    if checks.agents:
        missing.append("Anything about other agents.")
    return missing
