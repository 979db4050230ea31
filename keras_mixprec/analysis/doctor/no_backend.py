"""The report on a backend that is missing or broken, without Keras."""

import datetime
import json
import os
import pathlib

from keras_mixprec import _clock
from keras_mixprec.analysis.doctor.findings import judge
from keras_mixprec.analysis.doctor.machine import find_gpus
from keras_mixprec.analysis.doctor.report import DoctorReport
from keras_mixprec.analysis.doctor.versions import find_versions, installed


def without_backend(
    name: str, status: str, error: str, quick: bool
) -> DoctorReport:
    """Returns the report on a backend that cannot be used.

    Args:
        name: String, the backend's.
        status: String: `"missing"` or `"broken"`.
        error: String, why.
        quick: Boolean.
    """
    version = installed(name) or None
    versions = find_versions()
    backend = dict(name=name, version=version, status=status, error=error)
    facts = backend | {
        "backend": name,
        "kind": None,
        "devices": [],
        "compute_capability": None,
        "versions": versions,
    }
    return DoctorReport(
        backend=backend,
        kind=None,
        devices=[],
        versions=versions,
        settings=[],
        speed=[],
        self_test=[],
        findings=[f._asdict() for f in judge(facts, find_gpus())],
        recommendation=None,
        cache="",
        quick=quick,
        date=now(),
        seconds=0.0,
    )


def configured_backend() -> str:
    """Returns the backend that Keras is set to, without importing Keras."""
    if name := os.environ.get("KERAS_BACKEND"):
        return name
    home = pathlib.Path(os.environ.get("KERAS_HOME", "~/.keras")).expanduser()
    try:
        found = json.loads((home / "keras.json").read_text())
        return str(found["backend"])
    except (OSError, ValueError, KeyError, TypeError):
        return "tensorflow"


def now() -> str:
    """Returns the time, as reports state it."""
    date = datetime.datetime.fromtimestamp(int(_clock.wall()), datetime.UTC)
    return date.isoformat()
