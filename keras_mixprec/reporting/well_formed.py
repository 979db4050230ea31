"""Whether what a log holds has the form that its readers rely on.

People may log events of their own, other versions of this package have others,
and a log may be damaged: what has another form is left out.
"""

from keras_mixprec.reporting.facts import STORY
from keras_mixprec.reporting.schema import PRECISION_CHANGES

_NAME = str | None

_NONFINITE = ("nonfinite_losses", "nonfinite_gradients")
_OURS = STORY | {"skipped_step", "ranges_withheld", *_NONFINITE}
_OF_OURS = {
    "at_step": int,
    "layers": dict,
    "reasons": dict,
    "numbers": dict,
    "message": str,
    "variables": list,
    "kinds": dict,
    "loss": list,
    "counts": dict,
    "optimizer": str,
}
_OF_VERDICT = {
    "verdict": str,
    "layer": _NAME,
    "direction": _NAME,
    "advice": str,
}
_NEEDED = {
    "ranges_withheld": {"message"},
    **dict.fromkeys(PRECISION_CHANGES, {"layers"}),
    **dict.fromkeys(_NONFINITE, {"counts"}),
}
_OF_LAYER = {"path": str, "compute_dtype": str}


def is_event(event: dict) -> bool:
    """Whether an event can be read.

    Args:
        event: Dict, as JSON has it.
    """
    if not _fits(event, {"kind", "step"}, {"kind": str, "step": int}):
        return False
    kind = event["kind"]
    if kind not in _OURS:
        return True
    if not _fits(event, set(), _OF_OURS):
        return False
    if kind == "verdict" and not _fits(event, _OF_VERDICT.keys(), _OF_VERDICT):
        return False
    if not _NEEDED.get(kind, set()) <= event.keys():
        return False
    return (
        all(map(_is_change, event.get("layers", {}).values()))
        and all(isinstance(n, int) for n in event.get("counts", {}).values())
        and all(
            isinstance(rows, list)
            for name, rows in event.get("numbers", {}).items()
            if name.startswith("rows_of_")
        )
    )


def is_layer(row) -> bool:
    """Whether a row of the table of layers can be read.

    Args:
        row: Anything that JSON has.
    """
    return (
        isinstance(row, dict)
        and _fits(row, _OF_LAYER.keys(), _OF_LAYER)
        and all(_is_amount(row.get(name)) for name in ("work", "parameters"))
    )


def _fits(content, needed, types):
    return needed <= content.keys() and all(
        isinstance(content[name], kind)
        for name, kind in types.items()
        if name in content
    )


def _is_amount(value):
    known = isinstance(value, int | float)
    return value is None or known and 0 <= value < 2**63


def _is_change(change):
    return isinstance(change, dict) and isinstance(change.get("after"), str)
