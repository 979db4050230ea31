"""Event files: records, damage, and readers."""

import glob
import io
import os
import resource
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from reporting_readers import read_heat, read_tag
from tensorboard.summary.writer.record_writer import RecordWriter

from keras_mixprec.reporting import summaries
from keras_mixprec.reporting.event_file import (
    EventFile,
    event_file_paths,
    frame,
)
from keras_mixprec.reporting.run_files import RunFiles
from keras_mixprec.reporting.run_log import RunLog

pytestmark = pytest.mark.one_backend


def random_bytes(size):
    return np.random.default_rng(size).bytes(size)


def test_records_are_tensorboards():
    written = [random_bytes(size) for size in (10, 0, 1000, 5000)]
    file = io.BytesIO()
    writer = RecordWriter(file)
    for data in written:
        writer.write(data)
    assert b"".join(map(frame, written)) == file.getvalue()


def write_scalars(file, steps, tag="a"):
    for step in steps:
        file.write(step, [summaries.scalar(tag, step / 7)])


def test_steps_of_a_tag_rise_from_the_first_step_on(tmp_path):
    with EventFile(tmp_path, first_step=9) as file:
        write_scalars(file, [7], tag="early")
        write_scalars(file, [8, 9], tag="both")
        write_scalars(file, [9, 15, 14, 16])
    tags = {"early": [9], "both": [9], "a": [9, 15, 16]}
    assert {tag: list(read_tag(tmp_path, tag)) for tag in tags} == tags
    # The later value replaces the earlier one.
    assert read_tag(tmp_path, "both")[9] == np.float32(9 / 7)
    assert read_tag(tmp_path, "a")[15] == np.float32(2)


def test_names_sort_in_the_order_of_creation(tmp_path, clock):
    (tmp_path / "events.out.tfevents.2000000000.000000.x").touch()
    paths = []
    for _ in range(12):
        with EventFile(tmp_path) as file:
            paths.append(file.path)
    assert event_file_paths(tmp_path)[1:] == paths
    file.close()
    with pytest.raises(ValueError, match="closed"):
        write_scalars(file, [0])


def test_a_write_that_fails_half_way_is_taken_back(tmp_path):
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with EventFile(tmp_path) as file:
        write_scalars(file, [0])
        size = os.path.getsize(file.path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, hard))
        try:
            with pytest.raises(OSError, match="too large"):
                write_scalars(file, [1])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        write_scalars(file, [1, 2])
    assert list(read_tag(tmp_path, "a")) == [0, 1, 2]


ENDLESS = """
import itertools, sys
from keras_mixprec.reporting.run_log import RunLog
log = RunLog(sys.argv[1])
for step in itertools.count():
    log.scalars(step, {"a": step})
    log.event(step, {"kind": "skipped_step"})
    print(step, flush=True)
"""


def test_sigkill_loses_nothing(tmp_path):
    command = [sys.executable, "-c", ENDLESS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        for _ in range(300):
            last = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
    folder = tmp_path / "mixprec"
    steps = list(read_tag(folder, "a"))
    assert steps == list(range(len(steps)))
    assert len(steps) > last == 299
    lines = (folder / "events.jsonl").read_text().splitlines()
    assert len(lines) in (len(steps), len(steps) - 1)


FORK = """
import os, sys, threading
from keras_mixprec.reporting.run_log import RunLog
log = RunLog(sys.argv[1])
def write(steps):
    for step in steps:
        log.event(step, {"kind": "skipped_step"})
        log.rows(step, "scale", [[step, 1.0, 0, step]])
        log.scalars(step, {"a": step})
# A thread that holds the locks at most of the forks.
writer = threading.Thread(target=write, args=(range(1000),))
writer.start()
for _ in range(20):
    if not (child := os.fork()):
        write(range(5000, 5010))
        log.close()
        os._exit(0)
    os.waitpid(child, 0)
writer.join()
"""


def test_a_forked_child_is_silent(tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", FORK, str(tmp_path)]
    subprocess.run(command, check=True, timeout=600)
    folder = tmp_path / "mixprec"
    assert list(read_tag(folder, "a")) == list(range(1000))
    assert len((folder / "events.jsonl").read_text().splitlines()) == 1000


@pytest.fixture
def copied(canonical, tmp_path):
    """The folder of a log with five readings of layers."""
    log_dir = canonical["healthy"].log_dir
    return str(shutil.copytree(log_dir, tmp_path / "own") / "mixprec")


def test_a_record_that_is_cut_is_left_out_and_the_rest_is_read(copied):
    before = read_heat(copied)
    (path,) = glob.glob(f"{copied}/heat_*.bin")
    os.truncate(path, os.path.getsize(path) - 3)
    (table,) = RunFiles(copied).tables("heat")
    assert table.steps.tolist() == [*before][:-1]
    # Who goes on writes into a file of its own.
    with RunLog(os.path.dirname(copied)) as log:
        log.heat(99, [[1.0]], ["embed"], {"activation_headroom_bits": "min"})
    old, new = RunFiles(copied).tables("heat")
    assert old.steps.tolist() == table.steps.tolist()
    assert new.steps.tolist() == [99]
