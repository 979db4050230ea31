"""What the files of a log, a plan, a batch and a comparison have in common."""

import contextlib
import errno
import glob
import json
import os
import secrets
import shutil
import time

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


# What is being written ends in this, until it is whole.
_UNFINISHED = ".mixprec.tmp"

# It is locked within microseconds of its creation, and written in as many
# milliseconds.
_UNFINISHED_SECONDS = 10


def write_json(path: str | os.PathLike, content) -> None:
    """Writes JSON, so that a reader sees the old file or the new one.

    The file keeps its permissions, and a link to it stays one. What a killed
    process left half-written beside it is removed.

    Args:
        path: String or path object.
        content: What JSON can hold.

    Raises:
        OSError: If it cannot be written; the old file is left as it was.
    """
    path = os.path.realpath(path)
    check_regular(path)
    _remove_unfinished(path)
    # Beside the target, because a rename is atomic within one disk only.
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
    """Removes what killed processes left: old, and locked by nobody."""
    for other in glob.glob(f"{glob.escape(path)}.*{_UNFINISHED}"):
        with contextlib.suppress(OSError), open(other, "r+b") as file:
            age = time.time() - os.fstat(file.fileno()).st_mtime
            if age > _UNFINISHED_SECONDS and try_lock(file):
                os.unlink(other)


def write_bytes(path: str | os.PathLike, data: bytes) -> None:
    """Writes a file, replaced if it is there, in a folder that is made."""
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)


def check_local(log_dir: str | os.PathLike) -> str:
    """Returns `log_dir` as a string, or raises saying what is wrong."""
    if not isinstance(log_dir, str | os.PathLike):
        raise TypeError(
            "`log_dir` must be a path. "
            f"Received: log_dir={log_dir!r} of type {type(log_dir).__name__}"
        )
    log_dir = os.fspath(log_dir)
    if "://" in log_dir:
        raise ValueError(
            "`log_dir` must be a local folder; copy it to remote storage "
            f"after the run. Received: log_dir={log_dir!r}"
        )
    return log_dir
