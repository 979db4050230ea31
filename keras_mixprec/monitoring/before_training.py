"""Logs the findings of `lint` and `doctor` before training."""

from typing import Any

import keras

from keras_mixprec.loss_scaling.ensure import lacks_loss_scaling
from keras_mixprec.policies.layers import walk_with_model
from keras_mixprec.reporting.facts import WIDE

# Findings of `lint` and `doctor` with these severities harm training. The
# TensorBoard tab shows all other findings as warnings.
_BAD = "high", "error"

# `lint` may report a finding for every layer. Only this many findings, the most
# severe, are logged.
_MOST = 32


def check_before_training(lint: Any, doctor: Any) -> tuple[Any, Any]:
    """Validates the arguments `lint` and `doctor` of the monitor.

    Args:
        lint: `Findings`, or `None`.
        doctor: `DoctorReport`, or `None`.

    Raises:
        TypeError: If an argument has the wrong type.
    """
    _check("lint", lint, "at_least", "keras_mixprec.lint(model)")
    _check("doctor", doctor, "recommendation", "keras_mixprec.doctor()")
    return lint, doctor


def events_before_training(
    lint: Any, doctor: Any, model: keras.Model
) -> list[dict]:
    """Returns log events for the findings of `lint` and `doctor`.

    Findings that have been repaired are left out: the layer is in float32 now,
    or the model is compiled with loss scaling.

    Args:
        lint: `Findings`, or `None`.
        doctor: `DoctorReport`, or `None`.
        model: The `keras.Model`, before training.
    """
    events = [
        _event(f["name"], f["level"], f["text"], f["fix"], {"layer": None})
        for f in (doctor.findings if doctor is not None else [])
    ]
    found = lint.at_least("medium") if lint is not None else []
    dtypes = {e.path: e.layer.compute_dtype for e in walk_with_model(model)}
    found = [f for f in found if not _is_repaired(f, dtypes, model)]
    for finding in [f.to_dict() for f in found][:_MOST]:
        where = {key: finding[key] for key in ("layer", "numbers")}
        rule, severity = finding["rule"], finding["severity"]
        reason, fix = finding["reason"], finding["fix"]
        events.append(_event(rule, severity, reason, fix, where))
    return events


def _is_repaired(finding, dtypes, model):
    if finding.rule == "no_loss_scaling":
        return not lacks_loss_scaling(model)
    return bool(finding.rules) and dtypes.get(finding.layer) in WIDE


def _check(name, value, attribute, call):
    if value is not None and not hasattr(value, attribute):
        raise TypeError(
            f"`{name}` must be the result of `{call}`. "
            f"Received: {name}={value!r} of type {type(value).__name__}"
        )


def _event(finding, severity, message, advice, where):
    return {
        "kind": "before_training",
        "finding": finding,
        "level": "bad" if severity in _BAD else "warning",
        "message": message,
        "advice": advice,
    } | where
