"""TFRecord framing: how records follow each other in an event file.

TensorBoard's `RecordWriter` and its reader do the same over the slow checksum
(see `crc32c`); a log of 150 MB would take its reader 20 s to walk through.
"""

import os
import struct
from collections.abc import Iterator

from keras_mixprec.reporting.crc32c import masked_crc32c

_LENGTH = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")
_HEADER_SIZE = _LENGTH.size + _CHECKSUM.size


def frame(data: bytes) -> bytes:
    """Returns the record that holds `data`: length, data, a checksum each."""
    length = _LENGTH.pack(len(data))
    return b"".join(
        (
            length,
            _CHECKSUM.pack(masked_crc32c(length)),
            data,
            _CHECKSUM.pack(masked_crc32c(data)),
        )
    )


def read_records(path) -> Iterator[bytes]:
    """Yields what each whole record of a file holds.

    A record cut short, as a killed writer may leave one, or damaged ends the
    file: nobody knows where the next one begins.

    Args:
        path: String or path-like. The file.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        while len(header := file.read(_HEADER_SIZE)) == _HEADER_SIZE:
            (length,) = _LENGTH.unpack_from(header)
            # Asked before reading: a damaged length may be any number.
            if file.tell() + length + _CHECKSUM.size > size:
                return
            data = file.read(length)
            if header + data + file.read(_CHECKSUM.size) != frame(data):
                return
            yield data
