"""An append-only file, and a queue of writes for a full disk."""

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
    """An append-only file in which each write is all or nothing.

    Writes are unbuffered, so a killed process loses no write. If a write fails
    half-way, for example on a full disk, the file is truncated to its earlier
    size. The class is not thread-safe.

    Args:
        path: String or path-like. The file; created if missing.
        exclusive: Boolean. If `True`, locks the file against other writers.
            Defaults to `False`.

    Raises:
        BlockingIOError: If another writer has locked the file.
        OSError: If the file cannot be opened for appending.
    """

    def __init__(self, path, exclusive: bool = False):
        check_regular(path)
        # A finalizer closes the file, at the latest when Python exits.
        file = open(path, "ab", buffering=0)  # noqa: SIM115
        release = None
        if exclusive:
            locked = try_lock(file)
            if locked is None:
                release = make_lock_file(f"{path}.lock")
            if not locked and release is None:
                file.close()
                text = "Another writer has locked the file"
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
        check `ours` before they take a lock, because another thread may have
        held the lock during the fork.
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
            OSError: If not all of `data` could be written.
            ValueError: If the file is closed.
        """
        if self.removed:
            text = "The file was removed"
            raise FileNotFoundError(errno.ENOENT, text, self.path)
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
        """Truncates the file to `size` bytes."""
        self._file.truncate(size)
        self._size, self._torn = size, False


def _close(file, pid, release):
    # A forked child that closes its copy must not release the parent's lock.
    if os.getpid() == pid and not file.closed:
        unlock(file)
        if release is not None:
            release()
    file.close()


# The maximum number of bytes that may wait for a full disk. Hours of training
# write less.
LIMIT = 16 * 2**20


class Backlog:
    """Performs writes in order, and retries failed writes later.

    At most `LIMIT` bytes wait. Further writes are dropped.

    Attributes:
        lost: Int. The number of dropped writes.
    """

    def __init__(self):
        self.lost = 0
        self._waiting = deque()
        self._size = 0

    def write(self, size: int, work: Callable) -> None:
        """Performs all waiting writes, then `work`.

        Args:
            size: Int. The number of bytes that `work` writes.
            work: Function that writes everything or raises `OSError`.

        Raises:
            OSError: If the write must wait or is dropped.
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
        """Performs all waiting writes.

        Raises:
            OSError: If a write fails. The failed and all later writes wait.
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
    """Locks the first run folder that no other process writes to.

    Args:
        log_dir: String.

    Returns:
        The path of the folder, and its open `events.jsonl`.
    """
    numbers = itertools.count(1)
    while True:
        folder = os.path.join(log_dir, schema.run_folder(next(numbers)))
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, schema.EVENTS_FILE)
        with contextlib.suppress(BlockingIOError):
            return folder, open_lines(path, exclusive=True)


def open_lines(path, exclusive: bool = False) -> AppendFile:
    """Opens a file of lines and removes an incomplete last line.

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
