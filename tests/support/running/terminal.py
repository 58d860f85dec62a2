"""A terminal that tests type into and read."""

import os
import pty
import re
import threading
from collections.abc import Mapping
from types import TracebackType

from tests.support.running import children
from tests.support.running.children import LIMIT


class Terminal:
    """A pseudo terminal. `device` is the side for a child's streams; what is written there is read at once."""

    def __init__(self) -> None:
        self._own, self.device = pty.openpty()
        self._seen = b""
        self._more = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.hand_over()

    def hand_over(self) -> None:
        """Close this process's side of the device, once the child has it: reading ends with its last writer."""
        if self.device >= 0:
            os.close(self.device)
            self.device = -1

    def type(self, keys: bytes) -> None:
        """Press keys."""
        os.write(self._own, keys)

    def wait_for(self, pattern: bytes) -> None:
        """Wait until what is shown matches a regular expression; all up to the end of the match is then forgotten."""
        with self._more:
            self._more.wait_for(lambda: re.search(pattern, self._seen) or self._ended, LIMIT)
            found = re.search(pattern, self._seen)
            assert found, self._seen
            self._seen = self._seen[found.end() :]

    def rest(self) -> bytes:
        """All that is shown from here on, until the last writer is gone."""
        self.hand_over()
        self._reader.join(LIMIT)
        assert self._ended, self._seen
        return self._seen

    def _read(self) -> None:
        data = b"more"
        while data:
            try:
                data = os.read(self._own, 1 << 16)
            except OSError:  # how Linux reports that the other side is closed
                data = b""
            with self._more:
                self._seen += data
                self._ended = not data
                self._more.notify_all()
        os.close(self._own)


def on_terminal(*command: str, env: Mapping[str, str] | None = None) -> str:
    """What `command` writes to a terminal that is its standard output and error."""
    with Terminal() as terminal:
        environment = {**(env or os.environ), "TERM": "xterm"}
        process = children.start(*command, env=environment, stdout=terminal.device, stderr=terminal.device)
        said = terminal.rest()
        process.wait(LIMIT)
    return said.decode()
