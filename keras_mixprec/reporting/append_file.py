"""A file that is only ever appended to, and loses nothing."""

import os
import weakref


class AppendFile:
    """Hands every write to the operating system at once, whole or not at all.

    Nothing waits in a buffer of this process, so nothing is lost when it is
    killed. A write that fails half-way (disk full) is taken back, so what is
    written after space was made is readable. Writes from several threads have
    to take turns.

    Args:
        path: String or path-like. The file; created if missing.

    Raises:
        OSError: If the file cannot be opened for appending.
    """

    def __init__(self, path):
        # The finalizer below closes it, at the latest when Python exits.
        file = open(path, "ab", buffering=0)  # noqa: SIM115
        self._file = file
        self._size = file.tell()
        self._pid = os.getpid()
        self.close = weakref.finalize(self, file.close)

    @property
    def ours(self) -> bool:
        """Whether this is the process that opened the file.

        A forked child shares the file with its parent and would write the
        parent's records a second time. It has to be asked for before a lock
        is taken, which another thread may have held when the child was made.
        """
        return os.getpid() == self._pid

    def write(self, data: bytes) -> None:
        """Appends `data`.

        Raises:
            OSError: If not all of it could be written; then none of it is.
            ValueError: If the file is closed.
        """
        written = 0
        try:
            while written < len(data):
                written += self._file.write(data[written:])
        except OSError:
            self._file.truncate(self._size)
            raise
        self._size += written
