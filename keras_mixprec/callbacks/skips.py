"""Writing down which steps were skipped."""

from keras_mixprec.formats import format_power
from keras_mixprec.reporting.markdown import markdown_table


def log_skipped(log, step: int, name: str, reading, offset: int):
    """Writes the non-finite steps that a look found.

    Args:
        log: The `RunLog`.
        step: Int. The step of the look.
        name: String. Which of several optimizers it is, `""` if there is one.
        reading: `Reading` of that optimizer.
        offset: Int. From the optimizer's count of steps to the log's.
    """
    for skipped in reading.new_steps:
        log.event(
            step,
            {
                "kind": "skipped_step",
                "optimizer": name,
                "at_step": offset + skipped.step,
                "scale": skipped.scale,
                "variables": skipped.variables,
            },
        )
    if reading.unseen:
        log.event(
            step,
            {
                "kind": "skipped_steps_not_kept",
                "optimizer": name,
                "count": reading.unseen,
            },
        )
    if reading.new_steps:
        log.text(
            step,
            f"mixprec/skipped_step{'/' + name if name else ''}",
            markdown_table(_rows(reading.new_steps, offset)),
        )


def log_scale(log, step: int, name: str, reading, offset: int):
    """Writes how the loss scale went up to a look, where anything changed.

    Args:
        log: As for `log_skipped`.
        step: As for `log_skipped`.
        name: As for `log_skipped`.
        reading: As for `log_skipped`.
        offset: As for `log_skipped`.
    """
    first = reading.skipped - len(reading.new_steps) + 1
    # The scale was in use from the step before on.
    rows = [
        (offset + skipped.step - 1, skipped.scale, count, skipped.step - count)
        for count, skipped in enumerate(reading.new_steps, first)
    ]
    if rows or reading.unseen or reading.changed:
        count = reading.skipped
        rows.append((step, reading.loss_scale, count, step - offset - count))
        log.scale_rows(step, rows, name)


def _rows(steps, offset):
    return [
        {
            "step": offset + step.step,
            "loss scale": format_power(step.scale),
            "non-finite gradients": ", ".join(step.variables[:5])
            + (f" and {n} more" if (n := len(step.variables) - 5) > 0 else ""),
        }
        for step in steps
    ]
