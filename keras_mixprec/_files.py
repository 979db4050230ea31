"""Writes and locks the files of logs, plans and comparisons."""

import contextlib
import errno
import glob
import json
import os
import secrets
import shutil
import socket
from collections.abc import Callable

from keras_mixprec import _clock
from keras_mixprec._checks import check_type

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def check_regular(path) -> None:
    """Raises an error if a path exists and is not a file.

    The package would wait forever for the other end of a pipe, and would
    replace a device by a file.

    Args:
        path: String or path-like.

    Raises:
        FileExistsError: If the path is a folder, a pipe or a device.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise FileExistsError(
            errno.EEXIST, "Not a regular file", os.fspath(path)
        )


def try_lock(file) -> bool | None:
    """Locks an open file for this process, until the process ends at latest.

    Args:
        file: File object, open for writing.

    Returns:
        Boolean. `False` if another process holds the lock, `None` if the
        system or the disk has no locks.
    """
    if fcntl is None:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # Some network disks have no locks.
        return None
    return True


def unlock(file) -> None:
    """Releases a lock, also for forked children that share it."""
    if fcntl is not None:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)


def make_lock_file(path: str) -> Callable[[], None] | None:
    """Makes a file that serves as a lock where there are no locks.

    The file of a killed process is replaced.

    Args:
        path: String.

    Returns:
        Function that removes the file, or `None` if another process has made
        it.
    """
    with contextlib.suppress(OSError, ValueError):
        # Windows does not remove a file that a process holds open.
        if os.name == "nt" or not _is_held(path):
            os.unlink(path)
    try:
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR)
    except FileExistsError:
        return None
    os.write(file, f"{os.getpid()} {socket.gethostname()}".encode())

    def remove():
        os.close(file)
        with contextlib.suppress(OSError):
            os.unlink(path)

    return remove


def _is_held(path):
    """Whether the process that made a lock file may still run."""
    with open(path, encoding="utf-8") as file:
        number, _, host = file.read().partition(" ")
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return host != socket.gethostname()
    return True


# The name of an incomplete file ends in this.
_UNFINISHED = ".mixprec.tmp"

# An incomplete file that is older than this and not locked belongs to no
# process: files are locked within microseconds, and written in milliseconds.
_UNFINISHED_SECONDS = 10


def write_json(path: str | os.PathLike, content) -> None:
    """Writes JSON. A reader sees the old file or the new one.

    The file keeps its permissions, and a link to it stays a link. Incomplete
    files of killed processes next to it are removed.

    Args:
        path: String or path object.
        content: Anything that JSON can hold.

    Raises:
        OSError: If the file cannot be written; the old file does not change.
    """
    path = os.path.realpath(path)
    check_regular(path)
    _remove_unfinished(path)
    # The new file is in the same folder, because a rename is atomic only within
    # one disk.
    unfinished = f"{path}.{secrets.token_hex(4)}{_UNFINISHED}"
    try:
        with open(unfinished, "x", encoding="utf-8") as file:
            try_lock(file)
            json.dump(content, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        if os.path.exists(path):
            shutil.copymode(path, unfinished)
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unfinished)
        raise


def _remove_unfinished(path):
    """Removes incomplete files of killed processes."""
    for other in glob.glob(f"{glob.escape(path)}.*{_UNFINISHED}"):
        with contextlib.suppress(OSError), open(other, "r+b") as file:
            age = _clock.wall() - os.fstat(file.fileno()).st_mtime
            if age > _UNFINISHED_SECONDS and try_lock(file):
                os.unlink(other)


def write_bytes(path: str | os.PathLike, data: bytes) -> None:
    """Writes a file, replaces an old one, and makes the folder if missing."""
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)


def check_local(log_dir: str | os.PathLike) -> str:
    """Returns `log_dir` as an absolute path, or raises an error.

    The path is absolute because a script may change the working folder.
    """
    check_type("log_dir", log_dir, (str, os.PathLike), "a path")
    log_dir = os.fspath(log_dir)
    if "://" in log_dir:
        raise ValueError(
            "`log_dir` must be a local folder; copy it to remote storage "
            f"after the run. Received: log_dir={log_dir!r}"
        )
    return os.path.join(os.getcwd(), log_dir)
