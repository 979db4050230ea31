"""Writing down which steps were skipped."""

from collections import Counter, defaultdict

from keras_mixprec.formats import format_power
from keras_mixprec.reporting.markdown import markdown_table
from keras_mixprec.reporting.thinning import Thinning

# Skipped steps that are told one by one, half a kB each. A run that fails for
# a night skips a million.
_IN_FULL = 1000


class Skips:
    """Writes down which steps were skipped, most of them one by one.

    Args:
        log: The `RunLog`.
    """

    def __init__(self, log):
        self._log = log
        self._left = _IN_FULL
        self._uncounted = Counter()
        self._scales, self._changed = {}, {}
        self._waiting = defaultdict(list)
        self._rows_of_counts, self._rows_of_scale = Thinning(), Thinning()

    def tell(self, step: int, name: str, reading, offset: int):
        """Writes the non-finite steps that a look found.

        Args:
            step: Int. The step of the look.
            name: String. Which of several optimizers it is, `""` if there is
                one.
            reading: `Reading` of that optimizer.
            offset: Int. From the optimizer's count of steps to the log's.
        """
        steps = reading.new_steps if self._left > 0 else []
        self._left -= len(steps)
        for skipped in steps:
            self._log.event(
                step,
                {
                    "kind": "skipped_step",
                    "optimizer": name,
                    "at_step": min(offset + skipped.step, step),
                    "scale": skipped.scale,
                    "variables": skipped.variables,
                },
            )
        if steps:
            tag = f"mixprec/skipped_step{'/' + name if name else ''}"
            self._log.text(step, tag, markdown_table(_rows(steps, offset)))
        others = len(reading.new_steps) - len(steps) + reading.unseen
        self._uncounted[name] += others
        if others and self._rows_of_counts.due():
            self._tell_uncounted(step)

    def tell_scale(self, step: int, name: str, reading, offset: int):
        """Writes how the loss scale went up to a look, where it changed.

        Args:
            step: As for `tell`.
            name: As for `tell`.
            reading: As for `tell`.
            offset: As for `tell`.
        """
        if not (reading.changed or reading.new_steps):
            return
        rows = self._waiting[name]
        waited = len(rows)
        count = reading.skipped - len(reading.new_steps)
        scale = self._scales.get(name)
        for skipped in reading.new_steps:
            count += 1
            if skipped.scale != scale:
                # It was in use from the step before on. An optimizer that
                # steps several times a batch counts further than batches.
                at = min(offset + skipped.step - 1, step)
                rows.append((at, skipped.scale, count, skipped.step - count))
            scale = skipped.scale
        self._scales[name] = scale = reading.loss_scale
        changed = reading.changed or len(rows) > waited
        if rows and not changed and not self._changed.get(name):
            rows.pop()  # Nothing changed there either.
        self._changed[name] = changed
        good = step - offset - reading.skipped
        rows.append((step, scale, reading.skipped, good))
        if self._rows_of_scale.due():
            self._write_rows(step)

    def _write_rows(self, step):
        for name, rows in self._waiting.items():
            if rows:
                self._log.scale_rows(step, rows, name)
        self._waiting.clear()

    def tell_rest(self, step: int):
        """Writes what waits for being told."""
        self._write_rows(step)
        self._tell_uncounted(step)

    def _tell_uncounted(self, step):
        for name, count in self._uncounted.items():
            if count:
                event = {"kind": "skipped_steps_not_kept", "count": count}
                self._log.event(step, event | {"optimizer": name})
        self._uncounted.clear()


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
