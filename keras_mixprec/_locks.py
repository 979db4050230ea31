"""Locks of the operating system, which end with the process that has them."""

import contextlib

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


def try_lock(file) -> bool | None:
    """Locks an open file until it is unlocked or closed, or this process ends.

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
