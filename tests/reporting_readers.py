"""TensorBoard's own readers of a log, for the tests of the writer."""

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import types
import urllib.error
import urllib.parse
import urllib.request

import numpy as np
from tensorboard.backend.event_processing import event_file_loader
from tensorboard.util import tensor_util

if "tensorflow" not in sys.modules:
    # TensorBoard's own switch for its readers without TensorFlow, which would
    # take 10 s to import. With that backend they read through it.
    sys.modules["tensorboard.compat.notf"] = types.ModuleType("notf")

SERVER = os.path.join(os.path.dirname(__file__), "reporting_server.py")


def read_events(folder):
    """Every event of every file, in order, by TensorBoard's Python loader."""
    for name in sorted(os.listdir(folder)):
        if "tfevents" in name:
            path = os.path.join(folder, name)
            yield from event_file_loader.EventFileLoader(path).Load()


def read_tag(folder, tag):
    """Dict step -> array of one tag."""
    return {
        event.step: tensor_util.make_ndarray(value.tensor)
        for event in read_events(folder)
        for value in event.summary.value
        if value.tag == tag
    }


def read_rows(folder, table):
    """The rows of one of our tables."""
    try:
        with open(os.path.join(folder, f"{table}.jsonl")) as lines:
            return [json.loads(line) for line in lines]
    except FileNotFoundError:
        return []


def read_heat(folder, family="heat"):
    """Dict step -> array `[layers, metrics]`, read by NumPy alone."""
    found = {}
    for row in read_rows(folder, family):
        shape = len(row["metrics"]), len(row["layers"])
        dtype = [("step", "<i8"), ("values", "<f4", shape)]
        for step, values in np.fromfile(
            os.path.join(folder, row["file"]), dtype
        ):
            found[int(step)] = values.T
    return found


@contextlib.contextmanager
def tensorboard(log_dir, *flags, **environment):
    """The URL of a TensorBoard process on `log_dir`."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, SERVER, "--logdir", log_dir, *flags],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
        )
        try:
            yield poll(lambda: _printed_url(process, output))
        finally:
            process.terminate()
            process.wait()


def poll(look, seconds=600):
    """Calls `look()` until it is true, and returns its last result.

    Only a test that hangs reaches the time limit.
    """
    deadline = time.monotonic() + seconds
    while not (seen := look()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return seen


def get(url, route, **query):
    """Returns TensorBoard's JSON answer, `None` if it has no data yet."""
    query = urllib.parse.urlencode(query)
    try:
        with urllib.request.urlopen(f"{url}data/{route}?{query}") as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code not in (400, 404):
            raise
        error.close()
        return None


def _printed_url(process, output):
    output.seek(0)
    printed = output.read()
    assert process.poll() is None, printed
    found = re.search(r"http://127\.0\.0\.1:\d+\S*/", printed)
    return found and found[0]
