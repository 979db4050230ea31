"""An event file survives what happens to the process that writes it."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from reporting_readers import read_events, read_tag

from keras_mixprec.reporting import summaries
from keras_mixprec.reporting.event_file import EventFile, event_file_paths


def write_scalars(file, steps, tag="a"):
    for step in steps:
        file.write(step, [summaries.scalar(tag, step / 7)])


def test_first_event_is_the_version(tmp_path):
    with EventFile(tmp_path) as file:
        assert "tfevents" in file.path
    (event,) = read_events(tmp_path)
    assert event.file_version == "brain.Event:2"


def test_values_are_read_back_exactly(tmp_path):
    rng = np.random.default_rng(0)
    heat = rng.normal(size=(40, 200)).astype("float32")
    with EventFile(tmp_path) as file:
        for step, row in enumerate(heat):
            scalars = [summaries.scalar(f"s{i}", row[i]) for i in range(20)]
            file.write(step, [*scalars, summaries.numbers("heat", row)])
    np.testing.assert_array_equal([*read_tag(tmp_path, "heat").values()], heat)
    for i in range(20):
        read = [*read_tag(tmp_path, f"s{i}").values()]
        np.testing.assert_array_equal(read, heat[:, i])


def test_one_write_is_one_event_with_metadata_once(tmp_path):
    with EventFile(tmp_path) as file:
        for step in range(3):
            values = [summaries.scalar(tag, step) for tag in "ab"]
            file.write(step, values)
    _, *events = (e.summary.value for e in read_events(tmp_path))
    assert [[v.tag for v in values] for values in events] == [["a", "b"]] * 3
    (raw,) = (path.read_bytes() for path in tmp_path.iterdir())
    assert raw.count(b"scalars") == 2


@pytest.mark.parametrize("step", [5, 4, 0])
def test_steps_of_a_tag_must_rise(tmp_path, step):
    with EventFile(tmp_path) as file:
        write_scalars(file, [5])
        write_scalars(file, [step], tag="other")
        message = f"'a' continues from step 6.*Received: step={step}"
        with pytest.raises(ValueError, match=message):
            write_scalars(file, [step])
    assert list(read_tag(tmp_path, "a")) == [5]


def test_steps_begin_at_the_first_step(tmp_path):
    with EventFile(tmp_path, first_step=9) as file:
        with pytest.raises(ValueError, match="continues from step 9"):
            write_scalars(file, [7])
        file.replace(3, [summaries.strings("late", ["a"])])
        write_scalars(file, [9])
    assert list(read_tag(tmp_path, "late")) == [9]


def test_the_step_before_the_first_moves_and_gives_way(tmp_path):
    with EventFile(tmp_path, first_step=9) as file:
        write_scalars(file, [8], tag="moved")
        write_scalars(file, [8, 9], tag="both")
        with pytest.raises(ValueError, match="continues from step 10"):
            write_scalars(file, [9], tag="both")
    assert list(read_tag(tmp_path, "moved")) == [9]
    assert list(read_tag(tmp_path, "both").values()) == [np.float32(9 / 7)]


@pytest.mark.parametrize(
    ("step", "error"), [(1.5, TypeError), ("1", TypeError), (-1, ValueError)]
)
def test_a_step_is_a_count(tmp_path, step, error):
    with EventFile(tmp_path) as file, pytest.raises(error, match="`step`"):
        file.write(step, [summaries.scalar("a", 1.0)])


def test_names_sort_in_the_order_of_creation(tmp_path):
    ahead = int(time.time()) + 3600
    (tmp_path / f"events.out.tfevents.{ahead}.000000.x").touch()
    paths = []
    for _ in range(12):
        with EventFile(tmp_path) as file:
            paths.append(file.path)
    assert event_file_paths(tmp_path)[1:] == paths


def test_writing_to_a_closed_file_says_so(tmp_path):
    file = EventFile(tmp_path)
    file.close()
    file.close()
    with pytest.raises(ValueError, match="closed"):
        write_scalars(file, [0])


def test_threads_lose_nothing(tmp_path):
    tags = ["t0", "t1", "t2", "t3"]
    with EventFile(tmp_path) as file, ThreadPoolExecutor(4) as threads:
        list(
            threads.map(lambda tag: write_scalars(file, range(500), tag), tags)
        )
    for tag in tags:
        assert list(read_tag(tmp_path, tag)) == list(range(500))


def write_if_free(file, steps):
    for step in steps:
        with contextlib.suppress(ValueError):
            write_scalars(file, [step])


def test_threads_cannot_write_a_step_twice(tmp_path):
    with EventFile(tmp_path) as file, ThreadPoolExecutor(4) as threads:
        list(threads.map(write_if_free, [file] * 4, [range(500)] * 4))
    _, *events = read_events(tmp_path)
    assert [event.step for event in events] == list(range(500))


def test_a_write_that_fails_half_way_is_taken_back(tmp_path):
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with EventFile(tmp_path) as file:
        write_scalars(file, [0])
        size = os.path.getsize(file.path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, hard))
        try:
            with pytest.raises(OSError, match="File too large"):
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
        log.scale_rows(step, [[step, 1.0, 0, step]])
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
