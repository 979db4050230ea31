"""The log of a run: its content, and its survival of errors."""

import os
import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from full_disk import full, small_disk
from reporting_readers import read_events, read_heat, read_rows, read_tag

import keras_mixprec as kmp
from keras_mixprec.reporting import append_file, schema
from keras_mixprec.reporting.event_file import event_file_paths
from keras_mixprec.reporting.run import Run
from keras_mixprec.reporting.run_files import RunFiles
from keras_mixprec.reporting.run_log import RunLog

pytestmark = pytest.mark.one_backend


def lines_of(folder, kind=None):
    events = read_rows(folder, "events")
    return [e for e in events if kind is None or e["kind"] == kind]


def read(log):
    return Run("run", RunFiles(log.folder))


def test_every_event_has_a_line(tmp_path):
    def report(n):
        log.event(n // 5, {"kind": "skipped_step", "n": n, "norm": np.inf})
        log.scalars(0, {f"a{n}": n})

    with RunLog(tmp_path) as log, ThreadPoolExecutor(4) as threads:
        # One that is reported late keeps its own step.
        for step in 50, 40:
            log.event(step, {"kind": "demoted", "n": -1})
        list(threads.map(report, range(400)))
    late, early, *others = lines_of(log.folder)
    assert [late["step"], early["step"]] == [50, 40]
    assert sorted(x["n"] for x in others) == list(range(400))
    assert all(x["step"] == x["n"] // 5 for x in others)
    assert {x["norm"] for x in others} == {"inf"}
    tags = [v.tag for e in read_events(log.folder) for v in e.summary.value]
    assert {f"a{n}" for n in range(400)} <= {*tags}


def test_a_second_run_goes_on_behind_the_first(tmp_path):
    for run in range(3):
        with RunLog(tmp_path) as log:
            assert log.next_step == 10 * run
            for step in range(log.next_step, log.next_step + 10):
                log.scalars(step, {"a": run})
                log.event(step, {"run": run})
                log.rows(step, schema.SCALE, [[step, 1.0, 0, 0]])
    assert len(event_file_paths(log.folder)) == 3
    assert list(read_tag(log.folder, "a")) == list(range(30))
    assert [x["step"] for x in read_rows(log.folder, "scale")] == [*range(30)]
    assert [x["run"] for x in lines_of(log.folder)] == [
        n // 10 for n in range(30)
    ]


def test_two_runs_have_a_folder_each_where_nothing_can_be_locked(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("keras_mixprec._files.fcntl", None)
    with RunLog(tmp_path) as first, RunLog(tmp_path) as second:
        assert first.folder != second.folder
    # Whoever was killed has left this.
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    lock = tmp_path / "mixprec" / "events.jsonl.lock"
    lock.write_text(f"{ended.pid} {socket.gethostname()}")
    with RunLog(tmp_path) as third:
        assert third.folder == first.folder
    assert not lock.exists()


@pytest.mark.parametrize("cut", [1, 20])
def test_a_second_run_bears_what_a_killed_one_left(tmp_path, cut):
    with RunLog(tmp_path) as log:
        for step in range(3):
            log.event(step, {"n": step})
            log.scalars(step, {"a": step})
    (path,) = event_file_paths(log.folder)
    for torn in (path, os.path.join(log.folder, "events.jsonl")):
        os.truncate(torn, os.path.getsize(torn) - cut)
    with RunLog(tmp_path) as log:
        assert log.next_step == 3
        log.event(3, {"n": 3})
        log.scalars(3, {"a": 3})
    assert list(read_tag(log.folder, "a")) == [0, 1, 3]
    assert [x["n"] for x in lines_of(log.folder)] == [0, 1, 3]


@pytest.mark.parametrize("where", ["file", "file/below", "taken", "lines"])
def test_a_place_that_cannot_hold_a_log_is_refused(tmp_path, where):
    (tmp_path / "file").touch()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mixprec").touch()
    (tmp_path / "lines" / "mixprec" / "events.jsonl").mkdir(parents=True)
    with pytest.raises(OSError, match="`log_dir` must be") as caught:
        RunLog(tmp_path / where)
    assert caught.value.filename == str(tmp_path / where)
    assert not event_file_paths(tmp_path)


def test_what_cannot_be_written_is_refused_whole(tmp_path):
    with RunLog(tmp_path) as log, pytest.raises(TypeError, match="not JSON"):
        log.event(0, {"model": object()})
    assert lines_of(log.folder) == []


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path) as folder:
        yield folder


def write(log, steps):
    for step in steps:
        log.scalars(step, {"a": step})
        log.event(step, {"kind": "mine", "long": "x" * 500})
        log.rows(step, schema.SCALE, [[step, 1.0, 0, step]])


def warned(match="Training continues"):
    return pytest.warns(UserWarning, match=match)


def test_what_a_full_disk_does_not_take_is_written_later(disk):
    log = RunLog(disk)
    write(log, range(5))
    with full(disk), warned() as told:
        write(log, range(5, 40))
    write(log, range(40, 45))
    log.close()
    assert len(told) == 1
    assert "\n" not in str(told[0].message)
    assert list(read_tag(log.folder, "a")) == list(range(45))
    lines = [x["step"] for x in lines_of(log.folder, "mine")]
    assert lines == list(range(45))
    [gap] = lines_of(log.folder, "log_gap")
    assert (gap["lost"], gap["step"]) == (0, 40)
    assert 5 <= gap["from_step"] < 40


def test_beyond_the_memory_for_it_the_loss_is_counted(disk, monkeypatch):
    monkeypatch.setattr(append_file, "LIMIT", 4000)
    log = RunLog(disk)
    with full(disk), warned():
        write(log, range(200))
    write(log, range(200, 210))
    log.close()
    [gap] = lines_of(log.folder, "log_gap")
    assert gap["lost"] > 100
    kept = list(read_tag(log.folder, "a"))
    assert kept[-10:] == list(range(200, 210))
    assert len(kept) < 200
    rows = [row["step"] for row in read_rows(log.folder, "scale")]
    assert rows[-10:] == list(range(200, 210))


def remove(kind):
    def work(log_dir):
        (path,) = (log_dir / "mixprec").glob(f"*{kind}*")
        path.unlink()

    return work


def replace(log_dir):
    shutil.rmtree(log_dir)
    log_dir.write_text("theirs")


@pytest.mark.parametrize(
    ("damage", "kept"),
    [
        (shutil.rmtree, [3, 4, 5, 6]),
        (replace, [3, 4, 5, 6]),
        (remove("tfevents"), [3, 4, 5, 6]),
        (remove("events.jsonl"), [*range(7)]),
    ],
    ids=["folder", "replaced", "events", "lines"],
)
def test_what_is_removed_is_made_again(damage, kept, tmp_path):
    log_dir = tmp_path / "logs"
    log = RunLog(log_dir)
    log.layers(0, [{"path": "dense", "compute_dtype": "float16"}])
    log.layout(0, {"a": {"b": ["a"]}})
    write(log, range(3))
    damage(log_dir)
    with warned() as told:
        write(log, range(3, 6))
    assert len(told) == 1
    if log_dir.is_file():
        assert log_dir.read_text() == "theirs"
        log_dir.unlink()
    write(log, [6])
    log.close()
    assert log.folder == str(log_dir / "mixprec")
    assert list(read_tag(log.folder, "a")) == kept
    lines = [x["step"] for x in lines_of(log.folder, "mine")]
    assert lines[-4:] == [3, 4, 5, 6]
    assert len(lines_of(log.folder, "log_gap")) == 1
    # Tables of the whole run are written again.
    assert read_rows(log.folder, "layers")
    kmp.load_report(log_dir)


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
    assert len(os.listdir(log.folder)) == 7


METRICS = {"activation_headroom_bits": "min", "activation_nonfinite": "max"}


def test_what_happened_in_one_step_of_thousands_is_there(tmp_path):
    rare = 6543
    with RunLog(tmp_path) as log:
        for step in range(7001):
            table = np.array([[8.0, 0.0], [np.nan, 0.0]])
            if step == rare:
                table = np.array([[-2.0, 1.0], [3.0, 0.0]])
            log.heat(step, table, ["a", "b"], METRICS)
    rows = read_heat(log.folder)
    assert len(rows) == 1938  # The last, which waited, included.
    assert max(rows) == 7000
    (found,) = [step for step, row in rows.items() if row[0, 1]]
    assert rare <= found < rare + 8
    np.testing.assert_array_equal(rows[found], [[-2.0, 1.0], [3.0, 0.0]])
    grid = read(log).grid("activation_headroom_bits", 100)
    assert grid.worst.shape == (2, 97)  # Groups of 20 rows.
    # An infinity leaves no headroom, even if other numbers have some.
    (column,) = np.flatnonzero(grid.worst[0] == -np.inf)
    assert grid.first[column] <= found <= grid.last[column]
    assert grid.worst[1, column] == 3.0
    assert np.isnan(np.delete(grid.worst[1], column)).all()
