"""The checksum and the framing of records, against TensorBoard's own."""

import io

import numpy as np
import pytest
from tensorboard.compat.tensorflow_stub import pywrap_tensorflow
from tensorboard.summary.writer.record_writer import RecordWriter

from keras_mixprec.reporting.event_file import (
    frame,
    masked_crc32c,
    read_records,
)

# Around the block of 1024 bytes and the 4 bytes that carry the register.
EDGES = [*range(0, 70), *range(1020, 1034), *range(2046, 2054), 4097]
DRAWN = np.random.default_rng(0).integers(0, 70_000, 12).tolist()


def random_bytes(size):
    return np.random.default_rng(size).bytes(size)


@pytest.mark.parametrize(
    "sizes", [EDGES, [*DRAWN, 70_000]], ids=["edges", "drawn"]
)
def test_equals_tensorboards_checksum(sizes):
    for size in sizes:
        data = random_bytes(size)
        assert masked_crc32c(data) == pywrap_tensorflow.masked_crc32c(data)


@pytest.mark.parametrize("byte", [b"\0", b"\xff"], ids=["zeros", "ones"])
@pytest.mark.parametrize("size", [1, 3, 8, 1024, 1025, 3000])
def test_equals_tensorboards_checksum_of_one_byte_repeated(byte, size):
    data = byte * size
    assert masked_crc32c(data) == pywrap_tensorflow.masked_crc32c(data)


def test_check_value_of_the_standard():
    # RFC 3720, B.4: 32 bytes of zeros; unmasked 0x8A9136AA.
    crc = (masked_crc32c(bytes(32)) - 0xA282EAD8) & 0xFFFFFFFF
    assert ((crc << 15) | (crc >> 17)) & 0xFFFFFFFF == 0x8A9136AA


@pytest.mark.parametrize("size", [0, 1, 1000, 5000])
def test_record_equals_tensorboards(size):
    file = io.BytesIO()
    RecordWriter(file).write(random_bytes(size))
    assert frame(random_bytes(size)) == file.getvalue()


def test_records_are_read_back(tmp_path):
    written = [random_bytes(size) for size in (10, 0, 2000)]
    (tmp_path / "log").write_bytes(b"".join(map(frame, written)))
    assert list(read_records(tmp_path / "log")) == written


@pytest.mark.parametrize("cut", [1, 4, 30, 53, 54, 60, 65])
def test_a_record_cut_short_ends_the_file(tmp_path, cut):
    record = frame(random_bytes(50))
    (tmp_path / "log").write_bytes(record + record[:-cut])
    assert list(read_records(tmp_path / "log")) == [random_bytes(50)]


def test_a_damaged_length_ends_the_file(tmp_path):
    record = frame(random_bytes(50))
    (tmp_path / "log").write_bytes(record + b"\xff" * len(record))
    assert list(read_records(tmp_path / "log")) == [random_bytes(50)]
