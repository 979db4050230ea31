"""Reading, writing and locking files of logs, plans and comparisons."""

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
    """Raises if there is something else than a file at a path.

    Opening a pipe waits for whoever is at its other end, and a device must not
    be replaced by a file.

    Args:
        path: String or path-like.

    Raises:
        FileExistsError: If it is a folder, a pipe or a device.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise FileExistsError(
            errno.EEXIST, "Not a regular file", os.fspath(path)
        )


def try_lock(file) -> bool | None:
    """Locks an open file for this process, which need not live to unlock it.

    Args:
        file: File object, open for writing.

    Returns:
        Boolean. `False` if somebody else has it locked, `None` where the
        system or the disk knows no locks.
    """
    if fcntl is None:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # Some network disks have none.
        return None
    return True


def unlock(file) -> None:
    """Gives up a lock, also for the forked children that share it."""
    if fcntl is not None:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)


def make_lock_file(path: str) -> Callable[[], None] | None:
    """Makes a file that no other process can make, if there are no locks.

    One that a killed process left is taken over.

    Args:
        path: String.

    Returns:
        Function that removes it; `None` if somebody else has made it.
    """
    owner = f"{os.getpid()} {socket.gethostname()}"
    for _ in range(2):
        try:
            file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR)
        except FileExistsError:
            if not _remove_dead(path):
                return None
            continue
        os.write(file, owner.encode())
        return lambda: _give_up(file, path)
    return None


def _give_up(file, path):
    os.close(file)
    with contextlib.suppress(OSError):
        os.unlink(path)


def _remove_dead(path):
    """Returns whether the file of a process that is gone was removed."""
    try:
        if os.name != "nt":  # Windows removes no file that a process has open.
            with open(path, encoding="utf-8") as file:
                number, _, host = file.read().partition(" ")
            if host != socket.gethostname():
                return False
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(number), 0)
                return False
        os.unlink(path)
    except FileNotFoundError:
        return True
    except (OSError, ValueError):
        return False
    return True


# The name of a file ends in this until it is complete.
_UNFINISHED = ".mixprec.tmp"

# A file is locked within microseconds of its creation, and written within
# milliseconds.
_UNFINISHED_SECONDS = 10


def write_json(path: str | os.PathLike, content) -> None:
    """Writes JSON, so that a reader sees the old file or the new one.

    The file keeps its permissions, and a link to it stays one. Half-written
    files that a killed process left next to it are removed.

    Args:
        path: String or path object.
        content: What JSON can hold.

    Raises:
        OSError: If it cannot be written; the old file is left as it was.
    """
    path = os.path.realpath(path)
    check_regular(path)
    _remove_unfinished(path)
    # The file is next to the target, because a rename is atomic only within one
    # disk.
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
    """Removes files that killed processes left: old and without a lock."""
    for other in glob.glob(f"{glob.escape(path)}.*{_UNFINISHED}"):
        with contextlib.suppress(OSError), open(other, "r+b") as file:
            age = _clock.wall() - os.fstat(file.fileno()).st_mtime
            if age > _UNFINISHED_SECONDS and try_lock(file):
                os.unlink(other)


def write_bytes(path: str | os.PathLike, data: bytes) -> None:
    """Writes a file, replaced if it is there, in a folder that is made."""
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)


def check_local(log_dir: str | os.PathLike) -> str:
    """Returns `log_dir` as an absolute path, or raises saying what is wrong.

    Somebody may change the working folder while it is in use.
    """
    check_type("log_dir", log_dir, (str, os.PathLike), "a path")
    log_dir = os.fspath(log_dir)
    if "://" in log_dir:
        raise ValueError(
            "`log_dir` must be a local folder; copy it to remote storage "
            f"after the run. Received: log_dir={log_dir!r}"
        )
    return os.path.join(os.getcwd(), log_dir)
