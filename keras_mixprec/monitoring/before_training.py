"""What was found before training, as events of the log."""

from typing import Any

# By severity, as the tab shows them; what only costs time is left out.
_LEVELS = {
    "high": "bad",
    "medium": "warning",
    "error": "bad",
    "warning": "warning",
}

# A model may have a finding for each layer. The first are the most severe.
_MOST = 32


def events_before_training(lint: Any, doctor: Any) -> list[dict]:
    """Returns the events to log for what `lint` and `doctor` have found.

    Args:
        lint: `Findings`, or `None`.
        doctor: `DoctorReport`, or `None`.

    Raises:
        TypeError: If one is something else.
    """
    _check("lint", lint, "at_least", "keras_mixprec.lint(model)")
    _check("doctor", doctor, "recommendation", "keras_mixprec.doctor()")
    events = [
        _event(f["name"], f["level"], f["text"], f["fix"], {"layer": None})
        for f in (doctor.findings if doctor is not None else [])
    ]
    found = lint.at_least("medium") if lint is not None else []
    for finding in [f.to_dict() for f in found][:_MOST]:
        where = {key: finding[key] for key in ("layer", "numbers")}
        rule, severity = finding["rule"], finding["severity"]
        reason, fix = finding["reason"], finding["fix"]
        events.append(_event(rule, severity, reason, fix, where))
    return events


def _check(name, value, attribute, call):
    if value is not None and not hasattr(value, attribute):
        raise TypeError(
            f"`{name}` must be what `{call}` returned. "
            f"Received: {name}={value!r} of type {type(value).__name__}"
        )


def _event(finding, severity, message, advice, where):
    return {
        "kind": "before_training",
        "finding": finding,
        "level": _LEVELS[severity],
        "message": message,
        "advice": advice,
    } | where
