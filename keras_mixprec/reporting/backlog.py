"""Writes that wait while the disk takes none."""

from collections import deque
from collections.abc import Callable

# Bytes that may wait: all that hours of training log, and a small part of the
# memory of a process that trains.
LIMIT = 16 * 2**20


class Backlog:
    """Does writes in the order of their calls, later if they fail now.

    Args:
        limit: Int, bytes. When that much waits, what comes then is lost.
            Defaults to 16 MiB.

    Attributes:
        lost: Int. How many writes were lost.
    """

    def __init__(self, limit: int = LIMIT):
        self.lost = 0
        self._limit = limit
        self._waiting = deque()
        self._size = 0

    def write(self, size: int, work: Callable) -> None:
        """Does a write, after those that wait.

        Args:
            size: Int, bytes.
            work: Function that writes all or, raising `OSError`, nothing.

        Raises:
            OSError: If it has to wait, or is lost.
        """
        self._waiting.append((size, work))
        self._size += size
        try:
            self.flush()
        except OSError:
            if self._size > self._limit:
                self._waiting.pop()
                self._size -= size
                self.lost += 1
            raise

    def flush(self) -> None:
        """Does all that waits.

        Raises:
            OSError: If a write fails; that one and those behind it wait on.
        """
        while self._waiting:
            size, work = self._waiting.popleft()
            try:
                work()
            except OSError:
                self._waiting.appendleft((size, work))
                raise
            self._size -= size
