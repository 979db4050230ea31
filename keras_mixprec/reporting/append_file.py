"""A file that is only appended to, and waits for a full disk."""

import contextlib
import errno
import itertools
import os
import weakref
from collections import deque
from collections.abc import Callable

from keras_mixprec._files import check_regular, make_lock_file, try_lock, unlock
from keras_mixprec.reporting import schema


class AppendFile:
    """Hands every write to the operating system at once, whole or not at all.

    Nothing waits in a buffer of this process, so nothing is lost when it is
    killed. A write that fails half-way (disk full) is taken back, so what is
    written after space was made is readable. Writes from several threads have
    to take turns.

    Args:
        path: String or path-like. The file; created if missing.
        exclusive: Boolean. Whether nobody else may write to it at the same
            time. Defaults to `False`.

    Raises:
        BlockingIOError: If `exclusive`, and somebody else writes to it.
        OSError: If the file cannot be opened for appending.
    """

    def __init__(self, path, exclusive: bool = False):
        check_regular(path)
        # The finalizer below closes it, at the latest when Python exits.
        file = open(path, "ab", buffering=0)  # noqa: SIM115
        release = None
        if exclusive:
            locked = try_lock(file)
            if locked is None:
                release = make_lock_file(f"{path}.lock")
            if not locked and release is None:
                file.close()
                text = "Written to elsewhere"
                raise BlockingIOError(errno.EAGAIN, text, path)
        self.path = path
        self._file = file
        self._size = file.tell()
        self._torn = False
        self._pid = os.getpid()
        self.close = weakref.finalize(self, _close, file, self._pid, release)

    @property
    def ours(self) -> bool:
        """Whether this is the process that opened the file.

        A forked child shares the file with its parent and would write the
        parent's records a second time. It has to be asked for before a lock
        is taken, which another thread may have held when the child was made.
        """
        return os.getpid() == self._pid

    @property
    def removed(self) -> bool:
        """Whether the file is in no folder any more."""
        return not os.fstat(self._file.fileno()).st_nlink

    def write(self, data: bytes) -> None:
        """Appends `data`.

        Raises:
            FileNotFoundError: If the file was removed: what is written to it
                now would vanish with it.
            OSError: If not all of it could be written; then none of it is.
            ValueError: If the file is closed.
        """
        if self.removed:
            raise FileNotFoundError(errno.ENOENT, "It was removed", self.path)
        if self._torn:
            self.truncate(self._size)
        written, self._torn = 0, True
        try:
            while written < len(data):
                written += self._file.write(data[written:])
        except BaseException:
            self.truncate(self._size)
            raise
        self._torn = False
        self._size += written

    def truncate(self, size: int) -> None:
        """Drops all that is behind the first `size` bytes."""
        self._file.truncate(size)
        self._size, self._torn = size, False


def _close(file, pid, release):
    # A forked child that closes its copy must not unlock the parent's.
    if os.getpid() == pid and not file.closed:
        unlock(file)
        if release is not None:
            release()
    file.close()


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


def claim_folder(log_dir):
    """Takes the first folder that no other run is written to.

    Args:
        log_dir: String.

    Returns:
        Its path, and the open file of events in it.
    """
    numbers = itertools.count(1)
    while True:
        folder = os.path.join(log_dir, schema.run_folder(next(numbers)))
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, schema.EVENTS_FILE)
        with contextlib.suppress(BlockingIOError):
            return folder, open_lines(path, exclusive=True)


def open_lines(path, exclusive: bool = False) -> AppendFile:
    """Opens a file of lines, without the torn one that a killed writer left.

    Args:
        path: String or path-like.
        exclusive: As for `AppendFile`.

    Raises:
        As `AppendFile` does.
    """
    lines = AppendFile(path, exclusive)
    with open(path, "rb") as file:
        lines.truncate(file.read().rfind(b"\n") + 1)
    return lines
