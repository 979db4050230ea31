"""Logs of earlier versions of the schema."""

import json

import numpy as np

from keras_mixprec.metrics import AUDITED
from keras_mixprec.reporting import schema, summaries
from keras_mixprec.reporting.event_file import EventFile
from keras_mixprec.reporting.file_source import FileSource, find_runs
from keras_mixprec.reporting.run_data import RunData
from keras_mixprec.reporting.run_log import RunLog

LAYER = {"path": "a", "compute_dtype": "float16", "work": 1.0}
METRICS = {"twin_forward_error": "max", "twin_backward_error": "max"}


def write_version_1(log_dir):
    """What version 1 wrote of one step, in the words that it had."""
    with RunLog(log_dir) as log:
        folder = log.folder
    first = {"schema": 1, "layers": ["a"], "metrics": METRICS}
    table = np.float32([[0.5, 2.0]])
    with EventFile(folder) as file:
        file.write(3, [summaries.numbers("mixprec/twin/00000", table, **first)])
        row = json.dumps([LAYER])
        file.write(3, [summaries.strings("mixprec/layers", row)])


def test_a_log_of_version_1_is_read_and_continued(tmp_path):
    write_version_1(tmp_path)
    with RunLog(tmp_path) as log:
        table = np.float32([[0.25, 1.0]])
        log.heat(9, table, ["a"], AUDITED, schema.ERRORS)
    (folder,) = find_runs(tmp_path).values()
    run = RunData("run", FileSource(folder))
    assert not run.newer_schema
    errors = run.measured("forward_error_against_float32")
    assert errors == {"steps": [3, 9], "values": {"a": [0.5, 0.25]}}
    (layer,) = run.overview()["layers"]
    assert layer["share_of_flops"] == 1.0
    assert "work" not in layer


def test_histograms_of_when_all_tags_were_in_one_group(tmp_path):
    bins = np.array([[0.0, 1.0, 5.0]])
    with RunLog(tmp_path) as log:
        log.event(0, {"kind": "train_begin"})
        log.histogram(3, "mixprec/grad_exponent/a", bins)
        log.histogram(9, f"{schema.EXPONENTS['gradient']}/a", bins + 1)
    run = RunData("run", FileSource(log.folder))
    found = {"activation": [], "gradient": ["a"]}
    assert run.overview()["histograms"] == found
    found = {"steps": [3, 9], "exponents": [[0], [1]], "counts": [[5], [6]]}
    assert run.histogram("a", "gradient") == found | {"low": [0, 1]}
