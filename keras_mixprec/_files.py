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
except ImportError:  # Windows has no `fcntl`.
    fcntl = None  # type: ignore[assignment]


def check_regular(path) -> None:
    """Raises an error if a path exists and is not a file.

    Reading from a pipe could block forever, and writing would replace a device
    with a file.

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
    """Locks an open file for this process.

    The system releases the lock when the process ends.

    Args:
        file: File object, open for writing.

    Returns:
        Boolean. `True` if this process now holds the lock, `False` if another
        process holds it, `None` if the system or the disk has no locks.
    """
    if fcntl is None:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # Some network file systems have no locks.
        return None
    return True


def unlock(file) -> None:
    """Releases a lock, also for forked children that share it."""
    if fcntl is not None:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)


def make_lock_file(path: str) -> Callable[[], None] | None:
    """Creates a file that serves as a lock on systems without file locks.

    It replaces the lock file of a process that was killed.

    Args:
        path: String.

    Returns:
        Function that releases the lock, or `None` if another process holds it.
    """
    with contextlib.suppress(OSError, ValueError):
        # Windows refuses to remove a file that a live process holds open.
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
    """Returns whether the process that created a lock file may still run."""
    with open(path, encoding="utf-8") as file:
        number, _, host = file.read().partition(" ")
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return host != socket.gethostname()
    return True


# The suffix of files that are still being written.
_UNFINISHED = ".mixprec.tmp"

# An unfinished file is locked within microseconds of its creation. So an older
# unfinished file without a lock was left behind by a process that died.
_UNFINISHED_SECONDS = 10


def write_json(path: str | os.PathLike, content) -> None:
    """Writes a JSON file atomically.

    A reader sees either the old file or the new one. The file keeps its
    permissions, and a link to it stays a link. Incomplete files that killed
    processes left next to it are removed.

    Args:
        path: String or path object.
        content: Any value that JSON can hold.

    Raises:
        OSError: If the file cannot be written; the old file does not change.
    """
    path = os.path.realpath(path)
    check_regular(path)
    _remove_unfinished(path)
    # Create the new file in the same folder, because a rename is atomic only
    # within one file system.
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
    """Removes incomplete files that killed processes left behind."""
    for other in glob.glob(f"{glob.escape(path)}.*{_UNFINISHED}"):
        with contextlib.suppress(OSError), open(other, "r+b") as file:
            age = _clock.wall() - os.fstat(file.fileno()).st_mtime
            if age > _UNFINISHED_SECONDS and try_lock(file):
                os.unlink(other)


def write_bytes(path: str | os.PathLike, data: bytes) -> None:
    """Writes a file, and creates its folder if it is missing."""
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)


def check_local(log_dir: str | os.PathLike) -> str:
    """Returns `log_dir` as an absolute path, or raises an error.

    A relative path would break if the script changed its working folder.
    """
    check_type("log_dir", log_dir, (str, os.PathLike), "a path")
    log_dir = os.fspath(log_dir)
    if "://" in log_dir:
        raise ValueError(
            "`log_dir` must be a local folder; copy it to remote storage "
            f"after the run. Received: log_dir={log_dir!r}"
        )
    return os.path.join(os.getcwd(), log_dir)
