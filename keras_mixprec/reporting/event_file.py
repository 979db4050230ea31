"""TensorBoard's event files."""

import os
import re
import socket
import struct

from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

from keras_mixprec import _clock
from keras_mixprec.reporting import summaries
from keras_mixprec.reporting.append_file import AppendFile


def frame(data: bytes) -> bytes:
    """Returns a record: the length and `data`, each with a checksum."""
    length = struct.pack("<Q", len(data))
    return b"".join((length, _checksum(length), data, _checksum(data)))


def _checksum(data):
    return struct.pack("<I", masked_crc32c(data))


class EventFile:
    """A new event file in a folder.

    A write is one record and one system call, so a crash or SIGKILL loses no
    earlier write. Threads must not write at the same time.

    Args:
        folder: String. An existing folder.
        first_step: Int >= 0. The first step of this file, after those of the
            files that exist already.

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
        # The tags whose metadata the file has.
        self._described = set()
        self._file = _create(folder)

    @property
    def path(self) -> str:
        """The file; its name sorts after earlier ones, as readers expect."""
        return self._file.path

    @property
    def ours(self) -> bool:
        """True in the process that opened the file."""
        return self._file.ours

    def write(self, step: int, values: list) -> None:
        """Writes a step's values.

        TensorBoard's fast loader silently deletes earlier values of a tag at
        the same or a later step. So values whose step does not rise go to the
        last step of their tags, and replace the values there.

        Args:
            step: Int. Number of the training batch.
            values: List of `summaries.Value`.

        Raises:
            ValueError: If the file is closed.
            OSError: If the record could not be written as a whole.
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
    # Opening a pipe with such a name would block.
    return [path for path in paths if os.path.isfile(path)]


def _create(folder):
    """A file with the event that each file begins with."""
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
    """A name that sorts last, even if the clock was set back.

    Readers look for "tfevents" in the names of files.
    """
    earlier = event_file_paths(folder)
    seconds = int(_clock.wall())
    if earlier and (found := re.search(r"tfevents\.(\d+)", earlier[-1])):
        seconds = max(seconds, int(found[1]))
    return (
        f"events.out.tfevents.{seconds:010d}.{len(earlier):06d}."
        f"{socket.gethostname()}.{os.getpid()}.mixprec"
    )
