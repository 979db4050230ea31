"""What the files of a log, a plan and a batch have in common."""

import contextlib
import errno
import os

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
