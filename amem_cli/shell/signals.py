"""A signal first ends the running turn, whose output is committed, and then the process.

The process dies of the signal itself rather than exiting with a code, so that a shell loop stops too. Signals that
were ignored when the process started (`nohup`, background jobs) stay ignored.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

INTERRUPT = signal.SIGINT
CLOSED = signal.SIGPIPE  # how other programs die if their standard output is closed
_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stop:
    """Whether a signal has requested the end of a turn, and which. Calling it returns that."""

    def __init__(self) -> None:
        self.signum: int | None = None

    def __call__(self) -> bool:
        return self.signum is not None

    def request(self, signum: int, _frame: FrameType | None) -> None:
        """Signal handler: the first signal ends the turn, a second Ctrl-C kills the process at once."""
        if signum == signal.SIGINT and self.signum == signal.SIGINT:
            die(signum)
        self.signum = self.signum or signum

    def finish(self) -> None:
        """Die of the received signal, if there was one."""
        if self.signum is not None:
            die(self.signum)


@contextmanager
def listening() -> Iterator[Stop]:
    """While the context lasts, INT, TERM and HUP only set the flag of the yielded `Stop`."""
    stop = Stop()
    before = {signum: signal.getsignal(signum) for signum in _HANDLED}
    before = {signum: handler for signum, handler in before.items() if handler is not signal.SIG_IGN}
    for signum in before:
        signal.signal(signum, stop.request)
    try:
        yield stop
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def die(signum: int) -> NoReturn:
    """Kill this process with `signum`, as if it had never been caught."""
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)
    os._exit(128 + signum)  # reached only if the signal is blocked
