"""Every kind of event in a log: its fields, level and sentence.

Users may log their own events, other versions of this package may log other
kinds, and a log may be damaged. This module therefore checks events and table
rows when they are read. All other code can rely on their keys and types.
"""

from collections.abc import Iterator
from typing import NamedTuple

from keras_mixprec.reporting.schema import EXPONENTS


class Event(NamedTuple):
    """A kind of event.

    Attributes:
        says: String. The sentence, with field names in braces. Empty if a
            function in `told.py` writes the sentence.
        needs: String. The names of required fields. `None` if fields are not
            checked.
        level: String. One of `facts.LEVELS`, or `"demote"`, `"promote"` or
            `"skip"` for events that are not findings. Verdicts and findings
            before training bring their own level.
        lane: String. The row of marks below the loss scale curve that shows
            the event.
        is_story: Boolean. True if the headline depends on the event.
        title: String. Defaults to the kind in words.
    """

    says: str = ""
    needs: str | None = None
    level: str = "info"
    lane: str | None = None
    is_story: bool = False
    title: str | None = None


def _story(says="", needs="", level="info", lane=None):
    return Event(says, needs, level, lane, is_story=True)


_TUNER = "The tuner {message}."

EVENTS = {
    "train_begin": Event("Call {fit} of fit starts.", ""),
    "train_end": Event("Call to fit ends.", ""),
    "skipped_step": Event("", "", "skip", "skipped"),
    "skipped_steps_not_kept": Event(
        "{count} more skipped steps{span}. The log has only their number.",
        "count",
        "skip",
        "skipped",
        title="more skipped steps",
    ),
    "verdict": _story("", "verdict layer direction advice", lane="verdicts"),
    "before_training": Event(
        "{at}{message} {advice}",
        "finding level message",
        lane="verdicts",
    ),
    "trend": Event(
        "{layer}: {headroom_bits} bits left, overflow expected in "
        "{overflows_in_steps} steps.",
        None,
        "warning",
        "verdicts",
    ),
    "start": Event(_TUNER, lane="changes"),
    "keep": Event(_TUNER),
    "demote": _story(_TUNER, "layers", "demote", "changes"),
    "shrink": _story(_TUNER, "layers", "promote", "changes"),
    "promote": _story(_TUNER, "layers", "promote", "changes"),
    "undo": _story(_TUNER, "layers", "promote", "changes"),
    "return": _story(_TUNER, "message to done", lane="changes"),
    "spikes": _story(_TUNER, "message count times", "skip", "skipped"),
    "loss_scaling": Event(_TUNER, lane="changes"),
    "raise_scale": _story(_TUNER, lane="changes"),
    "lower_scale": _story(_TUNER, lane="changes"),
    "advise_scale": _story(_TUNER, lane="changes"),
    "give_up": _story("{message}", "", "bad", "changes"),
    "validate": Event(
        "Before the first step, {metric} is {float32} in float32."
    ),
    "sign_off": _story("At the end of training: {message}.", "within message"),
    "rebuild": Event("Train step rebuilt in {seconds} s."),
    "loss_scale_low": _story("", "message", "warning", "verdicts"),
    "loss_scale_recovered": _story("Loss scale {scale}: no longer too low."),
    "loss_scale_kept": Event(
        "Loss scale restored to {scale}: only bad data had lowered it."
    ),
    "loss_scale_not_known": Event(
        "The loss scale was set by hand or is not known at each step{span}.",
        level="warning",
    ),
    "no_loss_scaling": _story(
        "Layers compute in float16, but the loss is not scaled.",
        level="warning",
    ),
    "nonfinite_losses": _story(
        "Non-finite loss: {counts}.", "counts", "warning"
    ),
    "nonfinite_gradients": Event(
        "Non-finite gradients{of}: {counts}.", "counts"
    ),
    "metric_not_finite": _story("", "message", "warning"),
    "metric_finite": _story("The metric is finite again."),
    "validation_not_finite": _story("", "message", "warning"),
    "validation_finite": _story("The validation results are finite again."),
    "bad_batches": _story("{message}", "count message", "warning"),
    "no_16_bits": _story("Precision: {message}.", "message"),
    "graph_rewrite": Event("Graph rewrite: {message}."),
    "left_in_float16": Event("{message}", "message"),
    "ranges_measured": Event(
        "The monitor measured the ranges of all layers at {steps}, in "
        "{seconds} s.",
        "",
    ),
    "ranges_withheld": Event("{message}", "message", "warning"),
    "stopped": _story("Training stopped: {reason}", level="bad"),
    "step_raised": _story(
        "Step {at_step} raised {reason}{again}", "at_step reason", "bad"
    ),
    "fit_raised": _story(
        "Training ended in step {at_step}: {reason}", "at_step reason", "bad"
    ),
    "diagnosis_failed": Event("Diagnosis failed: {reason}", "reason", "bad"),
    "probe_failed": Event(
        "Probe failed at {layer}: {reason}", "reason", "warning"
    ),
    "plan_not_written": Event(
        "Plan not written: {reason}", "reason", "warning"
    ),
    "validation_failed": Event(
        "The metric is no longer evaluated: {reason}", "reason"
    ),
    "log_gap": Event(
        "No data could be logged from step {from_step} on ({reason}). {lost} "
        "records were lost.",
        level="warning",
    ),
    "trade_off": Event("The search for layers that need float32 has ended."),
    "unreadable": Event("{message}"),
}


# The kind of event that reports an event with unreadable fields.
UNREADABLE = "unreadable"

_NUMBER = int | float

# The keys that an event of each kind must have.
NEEDED = {
    kind: {*event.needs.split()}
    for kind, event in EVENTS.items()
    if event.needs is not None
}
# A range of steps needs both ends.
_ENDS = {"first_step", "last_step"}
_TYPES = {
    name: kind
    for kind, names in (
        (int, "at_step first_step last_step in_a_row fit count"),
        (int | None, "failing_since"),
        (dict, "layers because numbers settings counts kinds"),
        (str, "message finding level reason optimizer verdict advice details"),
        (str, "summary"),
        (list, "variables loss paths steps batches"),
        (str | None, "layer direction"),
        (bool, "within lost"),
        (int | float, "held seconds"),
    )
    for name in names.split()
}


def read_events(event: dict) -> Iterator[dict]:
    """Yields an event without its damaged keys, and a note that names them.

    If a required key is missing or damaged, yields only the note. If an
    event lacks its kind or step, yields nothing.

    Args:
        event: Dict from JSON.
    """
    kind, step = event.get("kind"), event.get("step")
    if not isinstance(kind, str) or not isinstance(step, int):
        return
    needed = NEEDED.get(kind)
    if needed is not None and event.keys() & _ENDS:
        needed = needed | _ENDS
    wrong = [key for key in event if not _is_readable(event, key, needed)]
    kept = {key: event[key] for key in event if key not in wrong}
    missing = sorted((needed or set()) - kept.keys())
    if not missing:
        yield kept
    if missing or wrong:
        keys = ", ".join(map(repr, sorted({*missing, *wrong})))
        left_out = "The event was" if missing else "These fields were"
        yield {
            "kind": UNREADABLE,
            "step": step,
            "message": f"The log has an event {kind!r} with fields that cannot "
            f"be read: {keys}. {left_out} left out.",
        }


def _is_readable(event, key, needed):
    value = event[key]
    if key == "wall_time":
        return isinstance(value, _NUMBER) and abs(value) < 2**63
    if needed is None:  # An unknown kind may have any fields.
        return True
    kind = _TYPES.get(key)
    if kind and not isinstance(value, kind):
        return False
    # Integers from 2**63 on cannot be steps, and `float` may fail on them.
    if kind and isinstance(value, int) and abs(value) >= 2**63:
        return False
    if key == "layers":
        return all(map(_is_change, value.values()))
    if key == "counts":
        return all(isinstance(count, int) for count in value.values())
    if key == "numbers":
        return all(_is_number(*item) for item in value.items())
    return True


def _is_number(name, value):
    if isinstance(value, int) and abs(value) >= 2**63:
        return False
    if name.startswith(("rows_of_", "samples_of_")):
        return isinstance(value, list)
    return not name.startswith("bad_samples_of_") or isinstance(value, int)


_OF_LAYER = {"path": str, "compute_dtype": str}
_AMOUNTS = ("share_of_flops", "parameters")


def is_layer(row) -> bool:
    """Returns whether a row of the table of layers is valid.

    Args:
        row: Any value from JSON.
    """
    return (
        isinstance(row, dict)
        and all(isinstance(row.get(n), kind) for n, kind in _OF_LAYER.items())
        and all(_is_amount(row.get(name)) for name in _AMOUNTS)
    )


def is_histogram(row: dict) -> bool:
    """Returns whether a row of the table of histograms is valid.

    Args:
        row: Dict.
    """
    exponents, counts = row.get("exponents"), row.get("counts")
    return (
        row.get("part") in (*EXPONENTS,)
        and isinstance(row.get("layer"), str)
        and isinstance(row.get("step"), int)
        and isinstance(exponents, list)
        and isinstance(counts, list)
        and len(exponents) == len(counts) > 0
        and all(isinstance(x, int) and -200 < x < 200 for x in exponents)
        and all(isinstance(x, int) and 0 <= x < 2**63 for x in counts)
    )


def _is_amount(value):
    known = isinstance(value, int | float)
    return value is None or known and 0 <= value < 2**63


def _is_change(change):
    return isinstance(change, dict) and isinstance(change.get("after"), str)
