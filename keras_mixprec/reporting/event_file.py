"""Writes TensorBoard's event files."""

import os
import re
import socket
import struct

from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

from keras_mixprec import _clock
from keras_mixprec.reporting import summaries
from keras_mixprec.reporting.append_file import AppendFile


def frame(data: bytes) -> bytes:
    """Returns a record: a length and `data`, each with a checksum."""
    length = struct.pack("<Q", len(data))
    return b"".join((length, _checksum(length), data, _checksum(data)))


def _checksum(data):
    return struct.pack("<I", masked_crc32c(data))


class EventFile:
    """A new event file in a folder.

    Each write is one record and one system call, so a crash or SIGKILL loses
    no earlier write. The class is not thread-safe.

    Args:
        folder: String. An existing folder.
        first_step: Int >= 0. The first step of this file. It must follow the
            last step of the existing files.

    Raises:
        OSError: If the file cannot be created.

    Example:
    >>> import tempfile
    >>> from keras_mixprec.reporting import summaries
    >>> with EventFile(tempfile.mkdtemp()) as file:
    ...     file.write(0, [summaries.scalar("loss_scale", 32768.0)])
    """

    def __init__(self, folder: str, first_step: int = 0):
        self._first_step = first_step
        self._last_steps = {}
        # Tags whose metadata is already in the file. TensorBoard needs the
        # metadata of a tag only once.
        self._described = set()
        self._file = _create(folder)

    @property
    def path(self) -> str:
        """The path, which sorts after earlier files, as readers expect."""
        return self._file.path

    @property
    def ours(self) -> bool:
        """True in the process that opened the file."""
        return self._file.ours

    def write(self, step: int, values: list) -> None:
        """Writes a step's values.

        If `step` is below the last step of a tag, the values are written at
        that last step. Otherwise TensorBoard's fast loader would silently
        delete all values of the tag from `step` on.

        Args:
            step: Int. Number of the training batch.
            values: List of `summaries.Value`.

        Raises:
            ValueError: If the file is closed.
            OSError: If the whole record could not be written.
                `FileNotFoundError` if the file was removed.
        """
        last = (self._last_steps.get(value.tag, 0) for value in values)
        step = max(step, self._first_step, *last)
        event = summaries.encode_event(step, values, self._described)
        self._file.write(frame(event))
        self._last_steps.update((value.tag, step) for value in values)
        self._described.update(value.tag for value in values)

    def restart(self, folder: str) -> None:
        """Continues in a new file after the old one was removed.

        Args:
            folder: String. An existing folder.

        Raises:
            OSError: If the file cannot be created.
        """
        old, self._file = self._file, _create(folder)
        self._described = set()
        old.close()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()


def event_file_paths(folder: str) -> list[str]:
    """Returns the event files in a folder, oldest first."""
    names = sorted(name for name in os.listdir(folder) if "tfevents" in name)
    paths = [os.path.join(folder, name) for name in names]
    # Leave out pipes, because opening a pipe would block.
    return [path for path in paths if os.path.isfile(path)]


def _create(folder):
    """Creates a file that begins with the version event."""
    path = os.path.join(folder, _next_name(folder))
    file = AppendFile(path)
    try:
        file.write(frame(summaries.encode_first_event()))
    except OSError:
        file.close()
        os.unlink(path)
        raise
    return file


def _next_name(folder):
    """Returns a name that sorts last, even if the clock was set back.

    Readers recognize event files by "tfevents" in their names.
    """
    earlier = event_file_paths(folder)
    seconds = int(_clock.wall())
    if earlier and (found := re.search(r"tfevents\.(\d+)", earlier[-1])):
        seconds = max(seconds, int(found[1]))
    return (
        f"events.out.tfevents.{seconds:010d}.{len(earlier):06d}."
        f"{socket.gethostname()}.{os.getpid()}.mixprec"
    )
