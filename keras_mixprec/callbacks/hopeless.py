"""Whether a run can still recover."""


def reason_to_stop(reading, verdicts, stop_after: int | None) -> str | None:
    """Returns the reason to stop early, or `None`.

    Args:
        reading: `Reading` of an optimizer.
        verdicts: List of the `Verdict`s of the run.
        stop_after: Int. Skipped steps in a row to wait for, `None` for ever.
    """
    if stop_after is None or reading.in_a_row < stop_after:
        return None
    skipped = f"{reading.in_a_row} steps in a row were skipped"
    if any(verdict.kind == "weights_lost" for verdict in verdicts):
        return f"{skipped} and the weights are not finite"
    if reading.collapsed:
        scale = f"{reading.loss_scale:g}"
        return f"{skipped} and a loss scale of {scale} does not help either"
    return skipped
