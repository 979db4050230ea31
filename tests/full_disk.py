"""Simulates a disk that is full for a while."""

import contextlib
import os
import resource
import subprocess


@contextlib.contextmanager
def small_disk(tmp_path):
    """A folder on a small disk, if this process may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", folder]
    mounted = not subprocess.run(command, capture_output=True).returncode
    try:
        yield folder
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", folder], check=True)


@contextlib.contextmanager
def full(folder):
    """Context in which the disk of a folder is full.

    If the folder has no own disk, no file of this process can grow.
    """
    if os.path.ismount(folder):
        filler = folder / "filler"
        with open(filler, "wb", buffering=0) as file:
            with contextlib.suppress(OSError):
                while file.write(bytes(4096)):
                    pass
            yield
        filler.unlink()
        return
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
