"""Lines of a file or of standard input, read by a thread of its own as they come."""

import os
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from threading import Event, Thread

_READ = 1 << 16


class Lines:
    """What has been read and not been taken. The thread reads the descriptor itself: no buffer is locked at the end."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._queue: SimpleQueue[bytes | OSError | None] = SimpleQueue()
        self._arrived = Event()
        self.wake: Callable[[], None] = self._arrived.set  # called when there is something to take
        self.ended = False
        self.error: OSError | None = None  # what ended it
        Thread(target=self._read, daemon=True, name="lines").start()

    def wait(self, seconds: float) -> None:
        """Wait for something to take, where nobody else is woken."""
        self._arrived.wait(seconds)
        self._arrived.clear()

    def take(self) -> Iterator[bytes]:
        """What is there. Sets `ended` at the end of the file, and `error` where it cannot be read any further."""
        while True:
            try:
                line = self._queue.get_nowait()
            except Empty:
                return
            if not isinstance(line, bytes):
                self.ended, self.error = True, line
                return
            yield line

    def _put(self, line: bytes | OSError | None) -> None:
        self._queue.put(line)
        self.wake()

    def _read(self) -> None:
        begun: list[bytes] = []  # of a line
        try:
            while data := os.read(self._descriptor, _READ):
                first, *others = data.split(b"\n")
                begun.append(first)
                for other in others:
                    self._put(b"".join(begun))
                    begun = [other]
        except OSError as error:
            self._put(error)
            return
        self._put(b"".join(begun))
        self._put(None)
