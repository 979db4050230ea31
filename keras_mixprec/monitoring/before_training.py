"""What was found before training, as events of the log."""

from typing import Any

# By severity, as the tab shows them; what only costs time is left out.
_LEVELS = {"high": "bad", "medium": "warning"}

# A model may have a finding for each layer. The first are the most severe.
_MOST = 32


def lint_events(findings: Any) -> list[dict]:
    """Returns the events to log for the findings of `lint`.

    Args:
        findings: `Findings`, or `None`.

    Raises:
        TypeError: If it is neither.
    """
    if findings is None:
        return []
    if not hasattr(findings, "at_least"):
        raise TypeError(
            "`lint` must be what `keras_mixprec.lint(model)` returned. "
            f"Received: lint={findings!r} of type {type(findings).__name__}"
        )
    found = [f.to_dict() for f in findings.at_least("medium")]
    return [
        {
            "kind": "before_training",
            "finding": finding["rule"],
            "level": _LEVELS[finding["severity"]],
            "layer": finding["layer"],
            "message": finding["reason"],
            "advice": finding["fix"],
            "numbers": finding["numbers"],
        }
        for finding in found[:_MOST]
    ]
