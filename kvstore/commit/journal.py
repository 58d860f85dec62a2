"""The journal: one line for every change of a ref, each holding the SHA-256 of the line before.

A line is an intent: it is flushed before the ref moves. A crash in between leaves a last intent whose ref did not
follow, and a crash in the middle of an append a torn last line. Both are legal, and the next writer repairs them: it
cuts off the torn line, and appends a line `void` after the intent. Lines hold ids, never names.
"""

import hashlib
import os
import pwd
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct

from kvstore.disk import files
from kvstore.disk.clock import timestamp
from kvstore.disk.locks import INTERNAL_WAIT, Lock
from kvstore.errors import DamageError, UsageError
from kvstore.format.document import Count, Document, Sha256, as_dict, encode, parse
from kvstore.format.layout import StoreLayout

VOID = "void"
NO_LINE = "0" * 64  # `prev` of the first line
MAX_LINE = 1 << 16  # bytes


class Actor(Struct, frozen=True):
    """Who makes a change and how: `via` is the command, `version` that of amem, `claimed` what the user says."""

    uid: int
    user: str
    host: str
    claimed: str | None
    via: str
    version: str

    @classmethod
    def here(cls, via: str, version: str, claimed: str | None = None) -> "Actor":
        """This process's user on this machine."""
        uid = os.getuid()
        try:
            user = pwd.getpwuid(uid).pw_name
        except KeyError:  # a container's user without an entry
            user = str(uid)
        return cls(uid, user, os.uname().nodename, claimed, via, version)


class Change(Document, frozen=True):
    """What a line says: an agent's state `before` and `after`, as manifest digests."""

    op: str
    agent_id: str
    domain_id: str
    before: Sha256 | None
    after: Sha256 | None
    note: str | None = None


class LineActor(Document, frozen=True):
    """The actor of a change, as a line has it."""

    uid: int
    user: str
    host: str
    claimed: str | None


class Entry(Document, frozen=True):
    """One line."""

    op: str
    agent_id: str
    domain_id: str
    before: Sha256 | None
    after: Sha256 | None
    note: str | None
    seq: Count  # from 1
    time: str
    prev: Sha256
    actor: LineActor
    via: str
    version: str

    @classmethod
    def of(cls, seq: int, prev: str, change: Change, actor: Actor) -> "Entry":
        """The line of a change that is made now."""
        who = LineActor(actor.uid, actor.user, actor.host, actor.claimed)
        own = as_dict(change)
        return cls(**own, seq=seq, time=timestamp(), prev=prev, actor=who, via=actor.via, version=actor.version)

    @property
    def change(self) -> Change:
        return Change(self.op, self.agent_id, self.domain_id, self.before, self.after, self.note)

    def line(self) -> bytes:
        return encode(self) + b"\n"

    @property
    def digest(self) -> str:
        """The SHA-256 of the line without its newline: what the next line holds as `prev`."""
        return hashlib.sha256(self.line()[:-1]).hexdigest()


def parse_line(line: bytes) -> Entry | None:
    """The entry of one line (without its newline), or None where it is malformed."""
    try:
        return parse(line, Entry)
    except ValueError:
        return None


def read_journal(path: Path) -> Iterator[Entry]:
    """All entries, oldest first, checking the chain; a torn last line is passed over. Takes no lock.

    Raises DamageError at the first line that is malformed or does not follow the one before.
    """
    try:
        *lines, _ = files.read(path).split(b"\n")
    except FileNotFoundError:
        return
    prev = NO_LINE
    for number, line in enumerate(lines, start=1):
        entry = parse_line(line)
        if entry is None or entry.seq != number or entry.prev != prev:
            raise DamageError(f"line {number} of {path} is altered or missing", "compare it with an older copy")
        prev = hashlib.sha256(line).hexdigest()
        yield entry


class JournalWriter:
    """Appends while its process holds the journal lock."""

    def __init__(self, path: Path, actor: Actor) -> None:
        self._path = path
        self._actor = actor
        last = _last_line(path)
        self.last = parse_line(last) if last else None
        self._seq = self.last.seq if self.last else _count_lines(path)  # a malformed line counts, and stays
        self._prev = hashlib.sha256(last).hexdigest() if last else NO_LINE

    def append(self, change: Change) -> Entry:
        """Append and flush one line. Raises UsageError for a note that does not fit, NoSpaceError."""
        entry = Entry.of(self._seq + 1, self._prev, change, self._actor)
        line = entry.line()
        if len(line) > MAX_LINE:
            raise UsageError("the note is too long", f"a journal line has up to {MAX_LINE} bytes")
        files.append(self._path, line)
        self._prev = hashlib.sha256(line[:-1]).hexdigest()
        self._seq = entry.seq
        return entry


@contextmanager
def writing(layout: StoreLayout, actor: Actor, followed: Callable[[Entry], bool]) -> Iterator[JournalWriter]:
    """Hold the journal lock, and with it the right to move refs. What a crash left behind is repaired first.

    `followed` says whether the ref of an entry did move.
    """
    with Lock(layout.lock("journal"), "the journal", actor.via).acquire(shared=False, wait=INTERNAL_WAIT):
        writer = JournalWriter(layout.journal, actor)
        last = writer.last
        if last and last.change.op != VOID and not followed(last):
            cut_off = last.change
            writer.append(Change(VOID, cut_off.agent_id, cut_off.domain_id, cut_off.before, cut_off.after))
        yield writer


def _count_lines(path: Path) -> int:
    try:
        return files.read(path).count(b"\n")
    except FileNotFoundError:
        return 0


def _last_line(path: Path) -> bytes | None:
    """The last whole line, without its newline; what follows it is cut off. None in an empty journal."""
    try:
        with files.reading(path) as (descriptor, size):
            start = max(0, size - MAX_LINE)
            end = os.pread(descriptor, MAX_LINE, start)
    except FileNotFoundError:
        return None
    whole, newline, torn = end.rpartition(b"\n")
    if torn:
        files.truncate(path, size - len(torn))
        return _last_line(path)
    return whole.rpartition(b"\n")[2] if newline else None
