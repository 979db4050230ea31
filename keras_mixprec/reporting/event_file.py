"""TensorBoard's event files: records and checksums.

TensorBoard's own checksum is a Python loop over bytes. It takes 153 us for a
record of 1.5 kB, more than twice the rest of writing it. The table lookups
below take 9 us.
"""

import os
import re
import socket
import struct
import threading

import numpy as np

from keras_mixprec import _clock
from keras_mixprec._checks import check_integer
from keras_mixprec.reporting import summaries
from keras_mixprec.reporting.append_file import AppendFile

_POLYNOMIAL = 0x82F63B78  # Castagnoli's, bits reversed.
_MASK_DELTA = 0xA282EAD8
_ALL_ONES = 0xFFFFFFFF

# Bytes looked up at once. The table takes 1 kB for each, and 1024 bytes already
# cover the common record in two lookups.
_BLOCK = 1024


def masked_crc32c(data: bytes) -> int:
    """Returns the CRC-32C of `data`, masked for the TFRecord format.

    Args:
        data: Bytes of any length.

    Returns:
        Int, 32 bits.

    References:
        - [RFC 3720, B.4](https://www.rfc-editor.org/rfc/rfc3720#appendix-B.4)
        - [TFRecord](https://www.tensorflow.org/tutorials/load_data/tfrecord)
    """
    register = _ALL_ONES
    for start in range(0, len(data), _BLOCK):
        register = _advance(register, data[start : start + _BLOCK])
    crc = register ^ _ALL_ONES
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & _ALL_ONES


def _advance(register, block):
    """The register after a block.

    The CRC is linear. Each byte followed by zeros gives a register, and the xor
    of all these is the register of the block. The register so far is xored into
    the first four bytes. A block of fewer bytes leaves a rest, which is shifted
    down.
    """
    size = len(block)
    indices = np.frombuffer(block, np.uint8).astype(np.intp)
    carried = np.frombuffer(register.to_bytes(4, "little"), np.uint8)
    indices[:4] ^= carried[:size]
    indices += _ROW_STARTS[_BLOCK - size :]
    return int(np.bitwise_xor.reduce(_TABLE.take(indices))) ^ (
        register >> 8 * size
    )


def _make_table():
    """Registers of a byte (column) followed by as many zeros as the row."""
    one_byte = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        one_byte = (one_byte >> 1) ^ (one_byte & 1) * np.uint32(_POLYNOMIAL)
    table = np.empty((_BLOCK, 256), np.uint32)
    table[0] = one_byte
    for row, previous in zip(table[1:], table, strict=False):
        row[:] = (previous >> 8) ^ one_byte[previous & 0xFF]
    return table


_TABLE = _make_table().ravel()
_ROW_STARTS = np.arange(_BLOCK - 1, -1, -1, dtype=np.intp) * 256


_LENGTH = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")


def frame(data: bytes) -> bytes:
    """Returns a record: the length and `data`, each with a checksum."""
    length = _LENGTH.pack(len(data))
    return b"".join(
        (
            length,
            _CHECKSUM.pack(masked_crc32c(length)),
            data,
            _CHECKSUM.pack(masked_crc32c(data)),
        )
    )


class EventFile:
    """A new event file in a folder, safe to write to from several threads.

    A write is one record and one system call, so a crash or SIGKILL loses no
    earlier write. Writes in a forked child do nothing.

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
        self._lock = threading.Lock()
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
            TypeError: If `step` is not an integer.
            ValueError: If the file is closed.
            OSError: If the record could not be written as a whole.
                `FileNotFoundError` if the file was removed.
        """
        step = check_integer("step", step)
        if not self.ours:
            return
        with self._lock:
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
        with self._lock:
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
