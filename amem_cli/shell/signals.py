"""Signals end a turn, not a process: what was said is committed first, and then the process dies of the signal.

Dying of the signal, rather than exiting with a number, is what makes a shell's loop stop. Signals that were ignored
when the process began (`nohup`, background jobs) stay ignored.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

INTERRUPT = signal.SIGINT
CLOSED = signal.SIGPIPE  # what a closed standard output is to other programs
_HEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stop:
    """Whether a signal has asked a turn to end, and which. Call it to ask."""

    def __init__(self) -> None:
        self.signum: int | None = None

    def __call__(self) -> bool:
        return self.signum is not None

    def hear(self, signum: int, _frame: FrameType | None) -> None:
        """The handler: the first signal ends the turn, a second Ctrl-C ends the process at once."""
        if signum == signal.SIGINT and self.signum == signal.SIGINT:
            die(signum)
        self.signum = self.signum or signum

    def finish(self) -> None:
        """Die of the signal that was heard, if there was one."""
        if self.signum is not None:
            die(self.signum)


@contextmanager
def listening() -> Iterator[Stop]:
    """While the context lasts, INT, TERM and HUP only set the flag."""
    stop = Stop()
    before = {signum: signal.getsignal(signum) for signum in _HEARD}
    before = {signum: handler for signum, handler in before.items() if handler is not signal.SIG_IGN}
    for signum in before:
        signal.signal(signum, stop.hear)
    try:
        yield stop
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def die(signum: int) -> NoReturn:
    """End the process by `signum`, as if it had never been caught."""
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)
    os._exit(128 + signum)  # where the signal is blocked
