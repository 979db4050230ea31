"""Computes shares of a model's FLOPs from the table of its layers."""

from collections.abc import Callable

from keras_mixprec.formats import SIXTEEN_BITS


def share_in_16_bits(rows: list[dict]) -> float | None:
    """Returns the share of the FLOPs in float16 or bfloat16.

    If layers with unknown FLOPs hold most of the parameters, the result is the
    share of the parameters instead. A model without parameters gives the share
    of the layers, and a model without layers gives `None`.

    Args:
        rows: List of dicts, as `PrecisionSummary.to_list` returns them.
    """
    measures: list[Callable] = [parameters, lambda row: 1]
    if knows_flops(rows):
        measures.insert(0, flops)
    shares = (_share(rows, measure) for measure in measures)
    return next((share for share in shares if share is not None), None)


def knows_flops(rows: list[dict]) -> bool:
    """Returns whether layers with known FLOPs hold half of the parameters."""
    known = [row for row in rows if row.get("share_of_flops") is not None]
    return 2 * sum(map(parameters, known)) >= sum(map(parameters, rows))


def flops(row: dict) -> float:
    """Returns a layer's share of the FLOPs, or 0 if it is unknown."""
    return row.get("share_of_flops") or 0


def parameters(row: dict) -> int:
    """Returns a layer's number of parameters, or 0 if it is unknown."""
    return row.get("parameters") or 0


def _share(rows, measure):
    total = sum(map(measure, rows))
    low = [r for r in rows if r["compute_dtype"] in SIXTEEN_BITS]
    return sum(map(measure, low)) / total if total else None
