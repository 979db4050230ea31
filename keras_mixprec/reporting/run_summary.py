"""What a run comes down to, in a row of the table of runs."""

from keras_mixprec.flop_shares import share_in_16_bits
from keras_mixprec.verdict_kinds import KINDS

# What is repaired comes after all that is not.
_AFTER_ALL = 1000


def shares_in_16_bits(layers: list) -> dict:
    """Returns the share of the FLOPs in 16 bits, at first and by now.

    Args:
        layers: List of dicts, as `read_layers` returns them.

    Returns:
        Dict with `"before"` and `"now"`, floats, `None` without layers.
    """
    first = [x | {"compute_dtype": x["dtypes"][0][1]} for x in layers]
    return {
        "before": share_in_16_bits(first),
        "now": share_in_16_bits(layers),
    }


def main_finding(events: list, layers: list) -> dict | None:
    """Returns the first cause that is still there, or else one repaired.

    Args:
        events: List of dicts, as `RunData.events` returns them.
        layers: List of dicts, after `add_repairs`.

    Returns:
        Dict with `"verdict"`, `"layer"` and `"repaired"`, `None` if nothing
        was found in the last `fit`, and nothing repaired before it.
    """
    repaired = {
        (x["path"], kind) for x in layers for kind in x["repaired_verdicts"]
    }
    starts = [i for i, e in enumerate(events) if e["kind"] == "train_begin"]
    start = starts[-1] if starts else 0
    found = [
        (event.get("rank", 0) + _AFTER_ALL * over, i, event, over)
        for i, event in enumerate(events)
        if event["kind"] == "verdict"
        for over in [(event["layer"], event["verdict"]) in repaired]
        if (over or i >= start) and event["verdict"] in KINDS
    ]
    if not found:
        return None
    *_, event, over = min(found, key=lambda each: each[:2])
    return {
        "verdict": event["verdict"],
        "layer": event["layer"],
        "repaired": over,
        "level": event["level"],
    }


def summary(overview: dict) -> dict:
    """Returns the row of a run.

    Args:
        overview: Dict, as `RunData.overview` returns it.

    Returns:
        Dict with the run's name, steps, skipped steps, last loss scales, main
        finding, sentence and share of FLOPs in 16 bits.

    Example:
    >>> from keras_mixprec.reporting.run_summary import summary
    >>> overview = {
    ...     "run": "a", "last_step": 9, "skipped": 1, "events": [],
    ...     "layers": [], "headline": {"text": "9 steps.", "state": "healthy"},
    ...     "scale": [{"optimizer": "", "scale": [2.0, 4.0]}],
    ...     "share_of_flops": {"before": 1.0, "now": 0.5},
    ... }
    >>> summary(overview)["scales"]
    [4.0]
    """
    copied = ("run", "last_step", "skipped", "headline", "share_of_flops")
    return {name: overview[name] for name in copied} | {
        "scales": [c["scale"][-1] for c in overview["scale"] if c["scale"]],
        "finding": main_finding(overview["events"], overview["layers"]),
        "layers": len(overview["layers"]),
        "demoted": sum(
            layer["demoted_at"] is not None for layer in overview["layers"]
        ),
    }
