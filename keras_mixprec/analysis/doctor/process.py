"""The doctor in a process of its own: for another backend, or a broken one.

Keras chooses its backend when it is imported, and a backend that crashes takes
its process with it.
"""

import traceback
from collections.abc import Callable
from typing import Any

from keras_mixprec.analysis.doctor.no_backend import (
    configured_backend,
    without_backend,
)
from keras_mixprec.analysis.doctor.report import DoctorReport
from keras_mixprec.analysis.doctor.timing import first_line
from keras_mixprec.analysis.isolated import EndedError, Isolated

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
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3"}
    if backend:
        environment["KERAS_BACKEND"] = backend
    child = Isolated(_examine, (quick,), imports_main=False, **environment)
    try:
        found = child.receive()
        while isinstance(found, str):
            say(found)
            found = child.receive()
        return found
    except EndedError as ended:
        last = ended.printed.strip().splitlines()[-1:]
        text = "; ".join([str(ended), *last])[:_LAST]
        name = backend or configured_backend()
        return without_backend(name, "broken", text, quick)
    finally:
        child.close()


def _examine(connection: Any, quick: bool) -> None:
    """Sends lines of progress, and the report at the end."""
    connection.send(f"importing {configured_backend()}")
    try:
        # Imports Keras, and so the backend.
        from keras_mixprec.analysis.doctor.examine import examine

        report = examine(quick, connection.send)
    except Exception as error:
        traceback.print_exc()
        name, text = configured_backend(), first_line(error)
        # Not what a backend in turn imports, which its own installation lacks.
        missing = getattr(error, "name", None) in (name, "keras")
        status = "missing" if missing else "broken"
        report = without_backend(name, status, text, quick)
    connection.send(report)
