"""Where in an event file which tag is, without reading the values.

Parsing all of a log takes as long as the log is large: 4 s for 140 MB, 50 of
which a folder may have. Most of a log is values of tags that are known by then,
whose records begin with all that an index needs.
"""

import errno
import functools
import os
import struct
from collections.abc import Iterator
from typing import NamedTuple

from keras_mixprec.reporting.event_file import masked_crc32c

_HEADER = struct.Struct("<QI")
_CHECKSUM_SIZE = 4

# Bytes of a record to look at: 40 and the tag.
_START = 256


class Entry(NamedTuple):
    """A whole record.

    Attributes:
        place: Int. Where in the file it begins.
        end: Int. Where the next one begins.
        tag: String. The tag of its first value, `None` if that is not to be
            seen from its beginning.
        alone: Boolean. Whether it has no other value.
    """

    place: int
    end: int
    tag: str | None
    alone: bool


def scan(path, start: int = 0) -> Iterator[Entry]:
    """Yields the whole records of a file, of which only the starts are read.

    A record cut short, as a killed writer may leave one, or with a damaged
    length ends the file: nobody knows where the next one begins.

    Args:
        path: String or path-like. The file.
        start: Int. Where to begin: 0, or where a record ends.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(start)
        while len(header := file.read(_HEADER.size)) == _HEADER.size:
            length, checksum = _HEADER.unpack(header)
            end = start + _HEADER.size + length + _CHECKSUM_SIZE
            if end > size or checksum != _checksum(length):
                return
            beginning = file.read(min(length, _START))
            file.seek(end)
            tag, alone = first_tag(beginning)
            yield Entry(start, end, tag, alone)
            start = end


def read_record(file, place: int) -> bytes | None:
    """Returns what a record holds, `None` if it is damaged.

    Args:
        file: The open file.
        place: Int. Where the record begins.

    Raises:
        OSError: If the file is shorter by now.
    """
    file.seek(place)
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise OSError(errno.ENODATA, "It was cut", file.name)
    length, _ = _HEADER.unpack(header)
    data, checksum = file.read(length), file.read(_CHECKSUM_SIZE)
    known = int.from_bytes(checksum, "little")
    return data if known == masked_crc32c(data) else None


def first_tag(beginning: bytes) -> tuple[str | None, bool]:
    """Returns the tag of an event's first value, and whether that is alone.

    `None` and `False` where the event has none, or it does not begin as
    protocol buffers write it: time, step, and the values with their tags first.

    Args:
        beginning: Bytes. The first of the event.
    """
    try:
        at = _expected(beginning, 0, _TIME) + 8
        if beginning[at] == _STEP:
            _, at = _varint(beginning, at + 1)
        size, at = _varint(beginning, _expected(beginning, at, _VALUES))
        end = at + size
        size, at = _varint(beginning, _expected(beginning, at, _VALUE))
        alone = at + size == end
        size, at = _varint(beginning, _expected(beginning, at, _TAG))
        tag = beginning[at : at + size]
        return (tag.decode(), alone) if len(tag) == size else (None, False)
    except (IndexError, ValueError):
        return None, False


# Numbers and types of the fields of an event, of its values and of a value.
_TIME, _STEP, _VALUES, _VALUE, _TAG = 0x09, 0x10, 0x2A, 0x0A, 0x0A


def _expected(data, at, field):
    if data[at] != field:
        raise ValueError(f"Another field: {data[at]}")
    return at + 1


def _varint(data, at):
    value = data[at] & 0x7F
    shift = 7
    while data[at] & 0x80:
        at += 1
        value |= (data[at] & 0x7F) << shift
        shift += 7
    return value, at + 1


# Most records of a log have one of a few lengths.
@functools.lru_cache(1024)
def _checksum(length):
    return masked_crc32c(length.to_bytes(8, "little"))
