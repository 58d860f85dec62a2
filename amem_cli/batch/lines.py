"""Lines of a file or of standard input, read by a background thread as they arrive."""

import os
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from threading import Event, Thread

_READ = 1 << 16


class Lines:
    """A queue of lines. The thread reads the raw descriptor, so that no buffer is locked when the process ends."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._queue: SimpleQueue[bytes | OSError | None] = SimpleQueue()
        self._arrived = Event()
        self.wake: Callable[[], None] = self._arrived.set  # called when a line or the end has arrived
        self.ended = False
        self.error: OSError | None = None  # why reading ended early
        Thread(target=self._read, daemon=True, name="lines").start()

    def wait(self, seconds: float) -> None:
        """Wait for a line, while `wake` is still this object's own."""
        self._arrived.wait(seconds)
        self._arrived.clear()

    def take(self) -> Iterator[bytes]:
        """The lines that have arrived. Sets `ended` at the end of the file, and `error` if reading failed."""
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
        started: list[bytes] = []  # pieces of an unfinished line
        try:
            while data := os.read(self._descriptor, _READ):
                first, *others = data.split(b"\n")
                started.append(first)
                for other in others:
                    self._put(b"".join(started))
                    started = [other]
        except OSError as error:
            self._put(error)
            return
        self._put(b"".join(started))
        self._put(None)
