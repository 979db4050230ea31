"""Where what is in a log is found without reading it, damaged or not."""

import os

import numpy as np
import pytest

from keras_mixprec.reporting import summaries
from keras_mixprec.reporting.event_file import event_file_paths, read_records
from keras_mixprec.reporting.file_source import FileSource
from keras_mixprec.reporting.record_index import first_tag, scan
from keras_mixprec.reporting.run_data import RunData
from keras_mixprec.reporting.run_log import RunLog
from keras_mixprec.reporting.run_summary import summary

METRICS = {"activation_headroom_bits": "min", "activation_nonfinite": "max"}


def written(log_dir, steps=20):
    """The only file of a log with values of every kind."""
    with RunLog(log_dir) as log:
        log.layers(0, [{"path": "a", "compute_dtype": "float16"}])
        for step in range(steps):
            log.scalars(step, {"b": step, "c": step})
            log.heat(step, [[float(step), 0.0]], ["a"], METRICS)
            log.histogram(step, "mixprec_activation_exponent/a", [[0, 1, step]])
            log.event(step, {"kind": "skipped_step", "at_step": step})
            log.scale_rows(step, [[step, 2.0, 0, step]])
    (path,) = event_file_paths(log.folder)
    return path


def test_each_record_is_found_with_its_first_tag(tmp_path):
    path = written(tmp_path)
    found = list(scan(path))
    records = list(read_records(path))
    assert found[-1].end == os.path.getsize(path)
    for entry, record in zip(found, records, strict=True):
        _, tags = summaries.decode_event(record)
        assert entry.tag == (tags[0] if tags else None)
        assert entry.alone == (len(tags) == 1)
    assert list(scan(path, found[5].end)) == found[6:]


@pytest.mark.parametrize("step", [0, 1, 127, 128, 10**6, 2**40])
@pytest.mark.parametrize("length", [1, 100, 200, 300])
def test_a_tag_is_read_from_the_beginning(step, length):
    tag = "\u00e9" * (length // 2) + "x"
    event = summaries.encode_event(step, [summaries.scalar(tag, 1.0)])
    assert first_tag(event) == (tag, True)
    found, _ = first_tag(event[:256])
    assert found == (tag if length < 300 else None)


def test_what_is_damaged_is_left_out_and_the_rest_is_read(tmp_path):
    path = written(tmp_path)
    known = FileSource(os.path.dirname(path))
    tag = "mixprec/heat/00000"
    places = [entry.place for entry in scan(path) if entry.tag == tag]
    with open(path, "r+b") as file:
        file.seek(places[7] + 60)
        byte = file.read(1)
        file.seek(places[7] + 60)
        file.write(bytes([byte[0] ^ 1]))
    found = FileSource(os.path.dirname(path))
    steps = [point.step for point in found.read(tag)]
    assert steps == [n for n in range(20) if n != 7]
    assert found.contents == known.contents
    assert found.written == known.written


def test_a_row_of_the_runs_is_what_all_of_the_run_comes_to(tmp_path):
    path = written(tmp_path)
    data = RunData("a", FileSource(os.path.dirname(path)))
    assert summary(data.outline()) == summary(data.overview())


def test_a_last_reading_of_weights_alone_is_not_all_there_was(tmp_path):
    path = written(tmp_path)
    with RunLog(tmp_path) as log:
        log.heat(99, np.full((1, 2), np.nan), ["a"], METRICS)
    data = RunData("a", FileSource(os.path.dirname(path)))
    assert summary(data.outline()) == summary(data.overview())
    assert "no range measured" not in data.outline()["headline"]["text"]
