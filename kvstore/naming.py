"""The names that users type: agents, snapshots, domains, and REF, the way a state is named everywhere."""

import os
import re
from dataclasses import dataclass

from kvstore.errors import UsageError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"sha256:([0-9a-f]{4,64})")


def check_name(kind: str, name: str) -> str:
    """Return `name` if it may name an agent, a snapshot or a domain; `kind` is the word for the message.

    Raises UsageError.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot be the name of {'an' if kind == 'agent' else 'a'} {kind}",
            "names have 1 to 64 letters, digits, dots, dashes and underscores, and begin with a letter or digit",
        )
    return name


def file_name(name: str) -> str:
    """The file name of `name`. Two names that differ only by case share it."""
    return name.lower()


def new_id() -> str:
    """A random id of an agent, domain, store or transaction: 128 bits in hex. Names only point to ids."""
    return os.urandom(16).hex()


@dataclass(frozen=True)  # no msgspec struct: `amem --help` would import msgspec for it alone
class Ref:
    """A state: an agent's head, a snapshot of it, the head N commits back, or a commit by its digest."""

    agent: str
    snapshot: str | None = None
    back: int = 0
    digest: str | None = None  # a prefix of the manifest's SHA-256, in hex

    @property
    def is_head(self) -> bool:
        return self.snapshot is None and self.digest is None and self.back == 0

    def __str__(self) -> str:
        if self.snapshot is not None:
            return f"{self.agent}@{self.snapshot}"
        if self.digest is not None:
            return f"{self.agent}@sha256:{self.digest}"
        return f"{self.agent}~{self.back}" if self.back else self.agent


def parse_digest(text: str) -> str | None:
    """The hex prefix of a `sha256:PREFIX`, or None where `text` is not one."""
    match = _DIGEST.fullmatch(text)
    return match[1] if match else None


def parse_ref(text: str) -> Ref:
    """Read `AGENT`, `AGENT@NAME`, `AGENT~N` or `AGENT@sha256:PREFIX`.

    Raises UsageError.
    """
    if "@" in text:
        agent, _, at = text.partition("@")
        check_name("agent", agent)
        if at.startswith("sha256:"):
            digest = parse_digest(at)
            if digest is None:
                raise UsageError(f"{at!r} is not a digest", "write sha256: and 4 to 64 hex digits")
            return Ref(agent, digest=digest)
        return Ref(agent, snapshot=check_name("snapshot", at))
    agent, tilde, back = text.partition("~")
    check_name("agent", agent)
    if not tilde:
        return Ref(agent)
    if not (back.isascii() and back.isdigit() and len(back) < 10):
        raise UsageError(f"{text!r} is not a state", "AGENT~N means N commits back, as in a~1")
    return Ref(agent, back=int(back))
