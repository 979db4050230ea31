"""Every kind of event in a log: its fields, level and sentence."""

from typing import NamedTuple


class Event(NamedTuple):
    """A kind of event.

    Attributes:
        says: String, the sentence, with the names of fields in braces. Empty if
            a function in `told.py` writes it.
        needs: String, the names of required fields. `None` if fields are not
            checked.
        level: String. One of `facts.LEVELS`, or `"demote"`, `"promote"` or
            `"skip"` for events that are not findings. Verdicts and findings
            before training have their own level.
        lane: String. The lane of its mark below the curve of the loss scale.
        is_story: Boolean. True if the sentence about the run depends on it.
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
    "train_end": Event("Call of fit ends.", ""),
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
    # The tuner.
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
        "Before the first step {metric} is {float32} in float32."
    ),
    "sign_off": _story("At the end of training: {message}.", "within message"),
    "rebuild": Event("Train step rebuilt in {seconds} s."),
    # The loss, and its scale.
    "loss_scale_low": _story("", "message", "warning", "verdicts"),
    "loss_scale_recovered": _story("Loss scale {scale}: no longer too low."),
    "loss_scale_kept": Event(
        "Loss scale {scale} again: it fell because of bad data alone."
    ),
    "loss_scale_not_known": Event(
        "Loss scale set by hand or not known at each step{span}.",
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
    "validation_finite": _story("The validation is finite again."),
    # Events about the data and the precision.
    "bad_batches": _story("{message}", "count message", "warning"),
    "no_16_bits": _story("Precision: {message}.", "message"),
    "graph_rewrite": Event("Graph rewrite: {message}."),
    "left_in_float16": Event("{message}", "message"),
    # Measurements.
    "ranges_measured": Event(
        "Ranges of all layers measured at {steps} beside training, in "
        "{seconds} s.",
        "",
    ),
    "ranges_withheld": Event("{message}", "message", "warning"),
    # Ends and failures.
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
        "The metric is not evaluated any more: {reason}", "reason"
    ),
    "log_gap": Event(
        "Nothing could be logged from step {from_step} on ({reason}); {lost} "
        "records lost.",
        level="warning",
    ),
    "trade_off": Event("Search for the layers that need float32 is done."),
    "unreadable": Event("{message}"),
}
