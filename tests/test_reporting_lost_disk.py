"""A log outlives a disk that is full, and files that are removed."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from full_disk import full, small_disk
from reporting_readers import read_tag
from test_reporting_run_log import lines_of

import keras_mixprec as kmp
from keras_mixprec.reporting import append_file as backlog
from keras_mixprec.reporting.event_file import event_file_paths
from keras_mixprec.reporting.run_log import RunLog


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path) as folder:
        yield folder


def write(log, steps):
    for step in steps:
        log.scalars(step, {"a": step})
        log.event(step, {"kind": "mine", "long": "x" * 500})
        log.scale_rows(step, [[step, 1.0, 0, step]])


def mine(folder):
    return [x["step"] for x in lines_of(folder) if x["kind"] == "mine"]


def gaps(folder):
    return [x for x in lines_of(folder) if x["kind"] == "log_gap"]


def test_what_a_full_disk_does_not_take_is_written_later(disk):
    log = RunLog(disk)
    write(log, range(5))
    with (
        full(disk),
        pytest.warns(UserWarning, match="Training goes on") as told,
    ):
        write(log, range(5, 40))
    write(log, range(40, 45))
    log.close()
    assert len(told) == 1
    assert "\n" not in str(told[0].message)
    assert list(read_tag(log.folder, "a")) == list(range(45))
    assert mine(log.folder) == list(range(45))
    [gap] = gaps(log.folder)
    assert (gap["lost"], gap["step"]) == (0, 40)
    assert 5 <= gap["from_step"] < 40


def test_beyond_the_memory_for_it_the_loss_is_counted(disk, monkeypatch):
    monkeypatch.setattr(backlog.Backlog.__init__, "__defaults__", (4000,))
    log = RunLog(disk)
    with full(disk), pytest.warns(UserWarning, match="could not be written"):
        write(log, range(200))
    write(log, range(200, 210))
    log.close()
    [gap] = gaps(log.folder)
    assert gap["lost"] > 100
    kept = list(read_tag(log.folder, "a"))
    assert kept[-10:] == list(range(200, 210))
    assert len(kept) < 200
    # The last rows of the scale are written with those that follow.
    *_, rows = read_tag(log.folder, "mixprec/scale/00000").values()
    assert len(rows) == 210


def test_a_removed_folder_is_made_again(tmp_path):
    log = RunLog(tmp_path / "logs")
    log.layers(0, [{"path": "dense", "compute_dtype": "float16"}])
    log.layout(0, {"a": {"b": ["a"]}})
    write(log, range(3))
    shutil.rmtree(tmp_path / "logs")
    with pytest.warns(UserWarning, match="It was removed") as told:
        write(log, range(3, 6))
    log.close()
    assert len(told) == 1
    assert list(read_tag(log.folder, "a")) == [3, 4, 5]
    assert mine(log.folder) == [3, 4, 5]
    assert list(read_tag(log.folder, "mixprec/layers")) == [3]
    assert len(gaps(log.folder)) == 1
    kmp.load_report(tmp_path / "logs")


@pytest.mark.parametrize("which", ["tfevents", "jsonl"])
def test_a_removed_file_is_made_again(tmp_path, which):
    log = RunLog(tmp_path)
    write(log, range(3))
    for name in os.listdir(log.folder):
        if which in name:
            os.unlink(os.path.join(log.folder, name))
    with pytest.warns(UserWarning, match="It was removed"):
        write(log, range(3, 6))
    log.close()
    assert log.folder == str(tmp_path / "mixprec")
    assert list(read_tag(log.folder, "a"))[-3:] == [3, 4, 5]
    assert mine(log.folder)[-3:] == [3, 4, 5]


def test_a_file_in_the_place_of_the_folder(tmp_path):
    log = RunLog(tmp_path / "logs")
    write(log, range(3))
    shutil.rmtree(tmp_path / "logs")
    (tmp_path / "logs").write_text("theirs")
    with pytest.warns(UserWarning, match="could not be written") as told:
        write(log, range(3, 6))
    assert (tmp_path / "logs").read_text() == "theirs"
    (tmp_path / "logs").unlink()
    write(log, range(6, 8))
    log.close()
    assert len(told) == 1
    assert list(read_tag(log.folder, "a")) == [3, 4, 5, 6, 7]


def test_a_full_disk_is_an_error_at_the_start(disk):
    with full(disk), pytest.raises(OSError, match="`log_dir` must be a folder"):
        RunLog(disk)
    assert not event_file_paths(disk / "mixprec")
    with RunLog(disk) as log:
        assert log.next_step == 0


HOLD = """
import sys
from keras_mixprec.reporting.run_log import RunLog
log = RunLog(sys.argv[1])
print(log.folder, flush=True)
input()
log.scalars(0, {"a": 1.0})
log.close()
"""


def test_a_second_run_at_the_same_time_has_its_own_folder(tmp_path):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", HOLD, tmp_path]
    with subprocess.Popen(command, **pipes) as process:
        first = process.stdout.readline().strip()
        logs = [RunLog(tmp_path), RunLog(tmp_path)]
        for value, log in enumerate(logs):
            log.scalars(0, {"a": value})
            log.close()
        process.communicate("\n")
    folders = [first, *(log.folder for log in logs)]
    names = [os.path.relpath(folder, tmp_path) for folder in folders]
    assert names == ["mixprec", "mixprec_2", "mixprec_3"]
    assert [read_tag(f, "a")[0].item() for f in folders] == [1.0, 0.0, 1.0]
    assert list(kmp.load_report(tmp_path).to_dict()) == names
    with RunLog(tmp_path) as log:
        assert (log.folder, log.next_step) == (first, 1)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_what_only_has_the_name_of_an_event_file_is_left_alone(tmp_path, make):
    with RunLog(tmp_path) as log:
        log.scalars(4, {"a": 1.0})
    make(tmp_path / "mixprec" / "events.out.tfevents.9999999999.x")
    make(tmp_path / "mixprec" / "0.tfevents")
    with RunLog(tmp_path) as log:
        assert log.next_step == 5
    kmp.load_report(tmp_path)
    assert len(os.listdir(log.folder)) == 5


def test_a_pipe_in_the_place_of_the_lines_is_refused(tmp_path):
    (tmp_path / "mixprec").mkdir()
    os.mkfifo(tmp_path / "mixprec" / "events.jsonl")
    with pytest.raises(OSError, match="Not a regular file"):
        RunLog(tmp_path)


def test_json_of_a_gap(tmp_path):
    """An outage is an event as others are."""
    log = RunLog(tmp_path / "logs")
    shutil.rmtree(tmp_path / "logs")
    with pytest.warns(UserWarning, match="could not be written"):
        write(log, [0])
    log.close()
    *_, told = read_tag(log.folder, "mixprec/events/00000").values()
    kinds = [json.loads(item)["kind"] for item in told]
    assert sorted(kinds) == ["log_gap", "mine"]
