"""One TensorBoard event file, written so that no reader loses a record."""

import os
import re
import socket
import threading
import time

from keras_mixprec._checks import check_integer
from keras_mixprec.reporting import summaries
from keras_mixprec.reporting.append_file import AppendFile
from keras_mixprec.reporting.records import frame


class EventFile:
    """A new event file in a folder, safe to write to from several threads.

    A write is one record and one call of the operating system: what was
    written before a crash, or SIGKILL, is read back. In a forked child writes
    do nothing.

    Args:
        folder: String. An existing folder.
        first_step: Int >= 0. The first step that this file may hold, behind
            those of the files that are there already.

    Raises:
        OSError: If the file cannot be created.

    Attributes:
        path: String. The file; its name sorts behind those before it, the
            order in which readers take them.

    Example:
    >>> import tempfile
    >>> from keras_mixprec.reporting import summaries
    >>> with EventFile(tempfile.mkdtemp()) as file:
    ...     file.write(0, [summaries.scalar("loss_scale", 32768.0)])
    """

    def __init__(self, folder: str, first_step: int = 0):
        self._first_step = first_step
        self._last_steps = {}
        self._moved = set()
        self._lock = threading.Lock()
        self._begin(folder)

    def _begin(self, folder):
        self._file = _create(os.path.join(folder, _next_name(folder)))
        self.path = self._file.path
        # The tags that the file says the meaning of.
        self._described = set()

    @property
    def ours(self) -> bool:
        """Whether this is the process that opened the file."""
        return self._file.ours

    def write(self, step: int, values: list) -> None:
        """Writes a step's values.

        A tag's steps have to rise: TensorBoard's fast loader deletes, without
        a word, whatever a tag has at a later or the same step. The step that
        earlier files end with is moved to the next one, where it gives way to
        what comes there.

        Args:
            step: Int. Of the training batch.
            values: List of what the functions of `summaries` return.

        Raises:
            TypeError: If `step` is not an integer.
            ValueError: If a tag has this or a later step already, or the file
                is closed.
            OSError: If the record could not be written; then none of it is.
                `FileNotFoundError` if the file was removed.
        """
        step = check_integer("step", step)
        if not self.ours:
            return
        with self._lock:
            moved = step == self._first_step - 1
            step += moved
            self._check_rises(step, values)
            self._append(step, values)
            tags = {value.tag for value in values}
            self._moved = self._moved | tags if moved else self._moved - tags

    def replace(self, step: int, values: list) -> None:
        """Writes values that contain all that their tags held before.

        Those may be deleted, so `step` may come late or twice: the values
        then go to the last step of their tags.

        Args:
            step: Int. Of the training batch.
            values: List of what the functions of `summaries` return.

        Raises:
            TypeError: If `step` is not an integer.
            ValueError: If the file is closed.
            OSError: If the record could not be written; then none of it is.
        """
        step = check_integer("step", step)
        if not self.ours:
            return
        with self._lock:
            last = (self._last_steps.get(value.tag, 0) for value in values)
            self._append(max(step, self._first_step, *last), values)

    def restart(self, folder: str) -> None:
        """Goes on in a new file, after the old one was removed.

        Args:
            folder: String. An existing folder.

        Raises:
            OSError: If the file cannot be created.
        """
        with self._lock:
            old = self._file
            self._begin(folder)
            old.close()

    def close(self) -> None:
        """Closes the file; nothing can be written any more."""
        self._file.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()

    def _check_rises(self, step, values):
        for value in values:
            last = self._last_steps.get(value.tag, self._first_step - 1)
            if step <= last - (value.tag in self._moved):
                raise ValueError(
                    f"The steps of a tag must rise; '{value.tag}' continues "
                    f"from step {last + 1}. Count batches across calls of "
                    f"`fit`, from `RunLog.next_step`. Received: step={step}"
                )

    def _append(self, step, values):
        event = summaries.encode_event(step, values, self._described)
        self._file.write(frame(event))
        self._last_steps.update((value.tag, step) for value in values)
        self._described.update(value.tag for value in values)


def event_file_paths(folder: str) -> list[str]:
    """Returns the event files in a folder, oldest first."""
    names = sorted(name for name in os.listdir(folder) if "tfevents" in name)
    paths = [os.path.join(folder, name) for name in names]
    # Whoever opens a pipe of such a name waits for ever.
    return [path for path in paths if os.path.isfile(path)]


def _create(path):
    """A file with the event that each begins with."""
    file = AppendFile(path)
    try:
        file.write(frame(summaries.encode_first_event()))
    except OSError:
        file.close()
        os.unlink(path)
        raise
    return file


def _next_name(folder):
    """A name behind all others, also within a second or with a clock set back.

    Readers know an event file by "tfevents" in its name.
    """
    earlier = event_file_paths(folder)
    seconds = int(time.time())
    if earlier and (found := re.search(r"tfevents\.(\d+)", earlier[-1])):
        seconds = max(seconds, int(found[1]))
    return (
        f"events.out.tfevents.{seconds:010d}.{len(earlier):06d}."
        f"{socket.gethostname()}.{os.getpid()}.mixprec"
    )
