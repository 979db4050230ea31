"""An append-only file, and writes that wait for a full disk."""

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
    """A file whose writes go to the operating system at once, as a whole.

    Writes are unbuffered, so a killed process loses none. If a write fails
    half-way, as on a full disk, the file is cut back to where it was. Threads
    must not write at the same time.

    Args:
        path: String or path-like. The file; created if missing.
        exclusive: Boolean. Whether to lock the file against other writers.
            Defaults to `False`.

    Raises:
        BlockingIOError: If `exclusive` and another writer has locked it.
        OSError: If the file cannot be opened for appending.
    """

    def __init__(self, path, exclusive: bool = False):
        check_regular(path)
        # The finalizer below closes it when Python exits, if not before.
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
        """True in the process that opened the file.

        A forked child would write its parent's records a second time. Callers
        check this before they take a lock, because another thread may have held
        the lock during the fork.
        """
        return os.getpid() == self._pid

    @property
    def removed(self) -> bool:
        """True if somebody has deleted the file."""
        return not os.fstat(self._file.fileno()).st_nlink

    def write(self, data: bytes) -> None:
        """Appends `data`.

        Raises:
            FileNotFoundError: If the file was removed.
            OSError: If `data` could not be written as a whole.
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
        """Cuts the file to its first `size` bytes."""
        self._file.truncate(size)
        self._size, self._torn = size, False


def _close(file, pid, release):
    # A forked child that closes its copy must not unlock the parent's.
    if os.getpid() == pid and not file.closed:
        unlock(file)
        if release is not None:
            release()
    file.close()


# Bytes that may wait, enough for hours of training.
LIMIT = 16 * 2**20


class Backlog:
    """Does writes in order, and keeps those that fail for later.

    At most `LIMIT` bytes wait; later writes are lost.

    Attributes:
        lost: Int. How many writes were lost.
    """

    def __init__(self):
        self.lost = 0
        self._waiting = deque()
        self._size = 0

    def write(self, size: int, work: Callable) -> None:
        """Does all waiting writes, then this one.

        Args:
            size: Int, bytes.
            work: Function that writes everything or raises `OSError`.

        Raises:
            OSError: If the write has to wait, or is lost.
        """
        self._waiting.append((size, work))
        self._size += size
        try:
            self.flush()
        except OSError:
            if self._size > LIMIT:
                self._waiting.pop()
                self._size -= size
                self.lost += 1
            raise

    def flush(self) -> None:
        """Does all waiting writes.

        Raises:
            OSError: If a write fails. It and all later ones keep waiting.
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
    """Takes the first folder without another writer.

    Args:
        log_dir: String.

    Returns:
        The path of the folder, and its open file of events.
    """
    numbers = itertools.count(1)
    while True:
        folder = os.path.join(log_dir, schema.run_folder(next(numbers)))
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, schema.EVENTS_FILE)
        with contextlib.suppress(BlockingIOError):
            return folder, open_lines(path, exclusive=True)


def open_lines(path, exclusive: bool = False) -> AppendFile:
    """Opens a file of lines, without an incomplete last line.

    Args:
        path: String or path-like.
        exclusive: Boolean, as in `AppendFile`.

    Raises:
        OSError: As in `AppendFile`.
    """
    lines = AppendFile(path, exclusive)
    with open(path, "rb") as file:
        lines.truncate(file.read().rfind(b"\n") + 1)
    return lines
