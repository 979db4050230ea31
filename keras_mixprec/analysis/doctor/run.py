"""`doctor`: checks a machine, and measures its speed in 16 bits.

Keras chooses its backend on import, and a backend that crashes ends its
process. So `doctor` examines every backend but the active one in a new process.
This file does not import Keras at the top, because the import may fail.
"""

import importlib
import json
import os
import pathlib
import sys
import traceback
from collections.abc import Callable
from typing import Any

from keras_mixprec._checks import check_choice, check_type
from keras_mixprec.analysis.doctor import machine
from keras_mixprec.analysis.doctor.findings import judge
from keras_mixprec.analysis.doctor.report import DoctorReport
from keras_mixprec.analysis.isolated import EndedError, Isolated

BACKENDS = ("tensorflow", "jax", "torch")

# The maximum length of an error, or of a crashed process' last output.
_LONGEST = 400


def doctor(backend: str | None = None, quick: bool = False) -> DoctorReport:
    """Checks this machine, and measures its speed in 16 bits.

    The report lists the devices, their native number formats, versions and
    known problems. `doctor` compares the results of each format with float64.
    It times products, convolutions and the training of a transformer block in
    each format against float32. It stores the measurements for
    `recommend_policy` and `"auto"`.

    `doctor` examines the active backend in this process, and initializes its
    default devices. It examines any other backend in a new process. Policies
    and random seeds do not change.

    Args:
        backend: String. `"tensorflow"`, `"jax"` or `"torch"`. Defaults to
            `None`: the backend that Keras uses.
        quick: Boolean. If `True`, measures one size of each operation and no
            emulated format, in seconds instead of half a minute. Defaults to
            `False`.

    Returns:
        A `DoctorReport`: `print` it, show it in a notebook, or take its
        attributes, such as `findings` and `recommendation`, or `to_dict()`.
        If the backend is missing or broken, a finding says so.

    Raises:
        ValueError: If there is no such backend.
        TypeError: If `quick` is not a boolean.

    Example:
    >>> report = doctor(quick=True)
    >>> report.recommendation["policy"] == recommend_policy().policy
    True
    """
    if backend is not None:
        check_choice("backend", backend, BACKENDS)
    check_type("quick", quick, bool, "a boolean")
    try:
        keras = importlib.import_module("keras")
    except Exception:  # Importing a backend may raise any error.
        return run_in_process(backend, quick)
    interactive = keras.config.is_interactive_logging_enabled()
    say = show if interactive else lambda line: None
    if backend not in (None, keras.backend.backend()):
        return run_in_process(backend, quick, say)
    examine = importlib.import_module(f"{__package__}.examine").examine
    return examine(quick, say)


def show(line: str) -> None:
    """Shows a line of progress on stderr."""
    print(f"doctor: {line} ...", file=sys.stderr, flush=True)


def run_in_process(
    backend: str | None, quick: bool, say: Callable = show
) -> DoctorReport:
    """Returns the report on a backend, from a new process.

    Args:
        backend: String, or `None` for the backend in Keras' settings.
        quick: Boolean. If `True`, measures less.
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
        text = "; ".join([str(ended), *last])[:_LONGEST]
        name = backend or _configured_backend()
        return _without_backend(name, "broken", text, quick)
    finally:
        child.close()


def _examine(connection: Any, quick: bool) -> None:
    """Sends lines of progress, then the report."""
    name = _configured_backend()
    connection.send(f"importing {name}")
    try:
        # `examine` imports Keras and the backend, which may raise any error.
        from keras_mixprec.analysis.doctor.examine import examine

        report = examine(quick, connection.send)
    except Exception as error:
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}".splitlines()[0][:_LONGEST]
        # If the backend itself lacks a module, it is broken, not missing.
        missing = getattr(error, "name", None) in (name, "keras")
        status = "missing" if missing else "broken"
        report = _without_backend(name, status, text, quick)
    connection.send(report)


def _configured_backend():
    """Returns the backend in Keras' settings, without importing Keras."""
    if name := os.environ.get("KERAS_BACKEND"):
        return name
    home = pathlib.Path(os.environ.get("KERAS_HOME", "~/.keras")).expanduser()
    try:
        found = json.loads((home / "keras.json").read_text())
        return str(found["backend"])
    except (OSError, ValueError, KeyError, TypeError):
        return "tensorflow"


def _without_backend(name, status, error, quick):
    version, versions = machine.installed(name) or None, machine.find_versions()
    backend = dict(name=name, version=version, status=status, error=error)
    facts = backend | {"backend": name, "kind": None, "devices": []}
    facts |= {"compute_capability": None, "versions": versions}
    findings = [f._asdict() for f in judge(facts, machine.find_gpus())]
    return DoctorReport(backend, versions, findings, quick)
