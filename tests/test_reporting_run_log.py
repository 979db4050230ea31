"""The log of a run: what it holds, and what a second run leaves alone."""

import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from reporting_readers import read_events, read_tag
from tensorboard.backend.event_processing import event_accumulator

from keras_mixprec.reporting.event_file import event_file_paths
from keras_mixprec.reporting.run_log import RunLog


def events_of(folder, chunk):
    tag = f"mixprec/events/{chunk:05d}"
    *_, last = read_tag(folder, tag).values()
    return [json.loads(item) for item in last]


def lines_of(folder):
    with open(os.path.join(folder, "events.jsonl")) as file:
        return [json.loads(line) for line in file]


def test_scalars_text_and_histogram_are_read_by_the_accumulator(tmp_path):
    bins = np.array([[0.0, 1.0, 5.0], [1.0, 2.0, 7.0]])
    with RunLog(tmp_path) as log:
        for step in range(5):
            log.scalars(step, {"mixprec/loss_scale": 2.0**step, "b": np.nan})
        log.text(5, "note", "**bold**")
        log.histogram(5, "h", bins)
    accumulator = event_accumulator.EventAccumulator(log.folder).Reload()
    scale = accumulator.Tensors("mixprec/loss_scale")
    assert [x.tensor_proto.float_val[0] for x in scale] == [1, 2, 4, 8, 16]
    assert [x.step for x in scale] == [0, 1, 2, 3, 4]
    assert read_tag(log.folder, "note")[5].item() == b"**bold**"
    np.testing.assert_array_equal(read_tag(log.folder, "h")[5], bins)


def test_layers_are_written_for_the_tab_and_for_people(tmp_path):
    table = [{"path": "conv", "compute": "float16", "amax": float("inf")}]
    with RunLog(tmp_path) as log:
        log.layers(0, table)
    written = json.loads(read_tag(log.folder, "mixprec/layers")[0].item())
    assert written == [{"path": "conv", "compute": "float16", "amax": "inf"}]
    text = read_tag(log.folder, "mixprec/layer_dtypes")[0].item().decode()
    assert "| conv | float16 | inf |" in text


def test_every_event_is_in_its_chunk_and_in_the_lines(tmp_path):
    with RunLog(tmp_path) as log:
        for n in range(40):
            log.event(n // 5, {"kind": "skipped_step", "n": n, "norm": np.inf})
    chunks = [events_of(log.folder, chunk) for chunk in range(3)]
    assert [len(chunk) for chunk in chunks] == [16, 16, 8]
    assert sum(chunks, []) == lines_of(log.folder)
    assert [x["n"] for x in lines_of(log.folder)] == list(range(40))
    assert lines_of(log.folder)[39]["step"] == 7
    assert lines_of(log.folder)[0]["norm"] == "inf"


def test_threads_lose_no_event(tmp_path):
    def report(n):
        log.event(n // 4, {"kind": "skipped_step", "n": n})

    with RunLog(tmp_path) as log, ThreadPoolExecutor(4) as threads:
        list(threads.map(report, range(400)))
    told = sum([events_of(log.folder, chunk) for chunk in range(25)], [])
    assert told == lines_of(log.folder)
    assert sorted(x["n"] for x in told) == list(range(400))


def test_an_event_reported_late_keeps_its_own_step(tmp_path):
    with RunLog(tmp_path) as log:
        log.event(50, {"kind": "demoted"})
        log.event(40, {"kind": "skipped_step"})
    assert list(read_tag(log.folder, "mixprec/events/00000")) == [50]
    assert [x["step"] for x in events_of(log.folder, 0)] == [50, 40]


def test_scale_rows_are_exact_beyond_float32(tmp_path):
    steps = 2**24 + np.arange(600)
    rows = np.stack([steps, 2.0 ** (steps % 250 - 125), steps % 7, steps], 1)
    with RunLog(tmp_path) as log:
        for part in np.split(rows, [1, 20, 300]):
            log.scale_rows(int(part[-1, 0]), part)
        log.scale_rows(0, np.empty((0, 4)))
    tags = [f"mixprec/scale/{chunk:05d}" for chunk in range(3)]
    last = [[*read_tag(log.folder, tag).values()][-1] for tag in tags]
    assert [len(chunk) for chunk in last] == [256, 256, 88]
    np.testing.assert_array_equal(np.concatenate(last), rows)


def test_a_second_run_goes_on_behind_the_first(tmp_path):
    for run in range(3):
        with RunLog(tmp_path) as log:
            assert log.next_step == 10 * run
            for step in range(log.next_step, log.next_step + 10):
                log.scalars(step, {"a": run})
                log.event(step, {"run": run})
                log.scale_rows(step, [[step, 1.0, 0, 0]])
    assert len(event_file_paths(log.folder)) == 3
    assert list(read_tag(log.folder, "a")) == list(range(30))
    for run in range(3):
        assert {x["run"] for x in events_of(log.folder, run)} == {run}
        tag = f"mixprec/scale/{run:05d}"
        assert [len(x) for x in read_tag(log.folder, tag).values()][-1] == 10
    assert [x["run"] for x in lines_of(log.folder)] == [0] * 10 + [1] * 10 + [
        2
    ] * 10


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


def test_a_second_run_cannot_hide_the_first(tmp_path):
    with RunLog(tmp_path) as log:
        log.scalars(7, {"a": 1.0})
    message = "'a' continues from step 8.*`RunLog.next_step`"
    with RunLog(tmp_path) as log, pytest.raises(ValueError, match=message):
        log.scalars(0, {"a": 2.0})


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
        # The event of step 2 is whole; only its scalar was cut.
        assert log.next_step == 3
        log.event(3, {"n": 3})
        log.scalars(3, {"a": 3})
    assert list(read_tag(log.folder, "a")) == [0, 1, 3]
    assert [x["n"] for x in lines_of(log.folder)] == [0, 1, 3]
    assert [x["n"] for x in events_of(log.folder, 0)] == [0, 1, 2]


def test_a_damaged_file_counts_up_to_the_damage(tmp_path):
    with RunLog(tmp_path) as log:
        log.scalars(0, {"a": 0.0})
        size = os.path.getsize(event_file_paths(log.folder)[0])
        log.scalars(1, {"a": 1.0})
    with open(event_file_paths(log.folder)[0], "r+b") as file:
        file.seek(size + 12)
        file.write(b"\xff" * 8)
    with RunLog(tmp_path) as log:
        assert log.next_step == 1


@pytest.mark.parametrize("where", ["file", "file/below", "taken", "lines"])
def test_a_place_that_cannot_hold_a_log_is_refused(tmp_path, where):
    (tmp_path / "file").touch()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mixprec").touch()
    (tmp_path / "lines" / "mixprec" / "events.jsonl").mkdir(parents=True)
    with pytest.raises(OSError, match="`log_dir` must be a folder") as caught:
        RunLog(tmp_path / where)
    assert caught.value.filename == str(tmp_path / where)
    assert not event_file_paths(tmp_path)


@pytest.fixture
def read_only(tmp_path):
    tmp_path.chmod(0o500)
    user = os.geteuid()
    if user == 0:  # Permissions do not stop root.
        os.seteuid(65534)
    yield tmp_path
    os.seteuid(user)
    tmp_path.chmod(0o700)


def test_a_read_only_folder_is_refused(read_only):
    with pytest.raises(PermissionError, match="Choose another or fix"):
        RunLog(read_only / "logs")


@pytest.mark.parametrize(
    ("log_dir", "error"),
    [(None, TypeError), (3, TypeError), ("gs://bucket/logs", ValueError)],
)
def test_a_log_dir_is_a_local_path(log_dir, error):
    with pytest.raises(error, match="`log_dir` must be a .*Received: log_dir="):
        RunLog(log_dir)


def test_scale_rows_refuses_other_shapes(tmp_path):
    message = r"Received: rows of shape \(4,\)"
    with RunLog(tmp_path) as log, pytest.raises(ValueError, match=message):
        log.scale_rows(0, [0, 1, 2, 3])


def test_an_event_that_is_no_json_is_refused_whole(tmp_path):
    message = "not JSON serializable"
    with RunLog(tmp_path) as log, pytest.raises(TypeError, match=message):
        log.event(0, {"model": object()})
    assert lines_of(log.folder) == []


WRITES = """
import sys
from keras_mixprec.reporting.run_log import RunLog
with RunLog(sys.argv[1]) as log:
    log.layers(0, [{"path": "dense", "compute": "float16"}])
    log.layout(0, {"Precision": {"Scale": ["mixprec/loss_scale"]}})
    log.scalars(0, {"mixprec/loss_scale": 1.0})
    log.text(0, "note", "text")
    log.histogram(0, "h", [[0, 1, 2]])
    log.event(0, {"kind": "skipped_step"})
    log.scale_rows(0, [[0, 1, 0, 0]])
print({"tensorflow", "jax", "torch", "keras"} & set(sys.modules))
"""


def test_writing_imports_no_backend(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "KERAS_BACKEND"}
    command = [sys.executable, "-c", WRITES, str(tmp_path)]
    printed = subprocess.check_output(command, env=environment, text=True)
    assert printed.strip() == "set()"


def test_settings_are_in_the_run_itself(tmp_path):
    known = {"policy": str}, {"mixprec/loss_scale": "loss scale"}
    for _ in range(2):
        with RunLog(tmp_path) as log:
            log.settings({"policy": "mixed_float16"}, *known)
    assert event_file_paths(tmp_path) == []
    tags = [v.tag for e in read_events(log.folder) for v in e.summary.value]
    assert set(tags) == {
        "_hparams_/experiment",
        "_hparams_/session_start_info",
    }
