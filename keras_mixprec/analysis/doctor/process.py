"""The doctor in a process of its own: for another backend, or a broken one.

Keras chooses its backend when it is imported, and a backend that crashes takes
its process with it. The child writes a line of JSON for each step, and one for
the report; what else it prints is left out.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable

import keras_mixprec
from keras_mixprec.analysis.doctor.no_backend import (
    configured_backend,
    without_backend,
)
from keras_mixprec.analysis.doctor.report import DoctorReport, from_dict

_CHILD = "keras_mixprec.analysis.doctor.child"

# Of what a process that crashed has printed last.
_LAST = 400


def run_in_process(
    backend: str | None, quick: bool, say: Callable
) -> DoctorReport:
    """Returns the report on a backend, from a process of its own.

    Args:
        backend: String, or `None` for the one that Keras is set to.
        quick: Boolean. Whether to measure less.
        say: Function that shows a line of progress.
    """
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    root = str(pathlib.Path(keras_mixprec.__file__).parents[1])
    paths = [root, os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if backend:
        environment["KERAS_BACKEND"] = backend
    command = [sys.executable, "-m", _CHILD, *(["--quick"] if quick else [])]
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        ) as child:
            found = _read(child.stdout, say)
        if found is None:
            errors.seek(0)
            found = _crashed(backend, quick, child.returncode, errors.read())
    return from_dict(found)


def _read(lines, say):
    """What the child reports at its end, `None` if it does not get there."""
    found = None
    for line in lines:
        try:
            message = json.loads(line)
        except ValueError:
            continue  # A library's own.
        if isinstance(message, dict) and "progress" in message:
            say(message["progress"])
        elif isinstance(message, dict) and "report" in message:
            found = message["report"]
    return found


def _crashed(backend, quick, status, errors):
    how = f"ended with status {status}"
    if status < 0:
        how = f"was killed by {signal.Signals(-status).name}"
    last = errors.strip().splitlines()[-1:]
    text = "; ".join([f"its process {how}", *last])[:_LAST]
    name = backend or configured_backend()
    return without_backend(name, "broken", text, quick).to_dict()
