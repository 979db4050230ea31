"""Writing down which steps were skipped."""

import dataclasses
from collections import defaultdict

from keras_mixprec.callbacks.stretch import Block
from keras_mixprec.formats import format_power
from keras_mixprec.reporting.markdown import markdown_table
from keras_mixprec.reporting.schema import curve_tag
from keras_mixprec.reporting.thinning import Thinning

# Skipped steps that are told one by one, half a kB each. A run that fails for
# a night skips a million.
_IN_FULL = 1000


class Skips:
    """Writes down which steps were skipped, and how the loss scale went.

    Args:
        log: The `RunLog`.
    """

    def __init__(self, log):
        self._log = log
        self._left = _IN_FULL
        self._blocks, self._gaps = {}, {}
        self._waiting, self._closed = defaultdict(list), {}
        self._blocks_thinning, self._rows_thinning = Thinning(), Thinning()

    def tell(self, name: str, reading):
        """Writes what a reading found.

        Args:
            name: String. Which of several optimizers it is, `""` if there is
                one.
            reading: `Reading` of that optimizer.
        """
        self._tell_steps(name, reading)
        self._tell_scale(name, reading)

    def tell_rest(self, step: int):
        """Writes what waits for being told.

        Args:
            step: Int.
        """
        self._write_rows(step)
        self._write_blocks(step)

    def _tell_steps(self, name, reading):
        step = reading.step
        steps = reading.new_steps[: self._left]
        self._left -= len(steps)
        for skipped in steps:
            self._log.event(
                step,
                {
                    "kind": "skipped_step",
                    "optimizer": name,
                    "at_step": skipped.step,
                    "scale": skipped.scale,
                    "variables": skipped.variables,
                    "kinds": skipped.kinds,
                    **({"loss": skipped.loss} if skipped.loss else {}),
                    # Rows of the batch, where the data are to blame.
                    **({"bad_input": skipped.inputs} if skipped.inputs else {}),
                },
            )
        if steps:
            tag = curve_tag("mixprec/skipped_step", name)
            self._log.text(step, tag, markdown_table(_rows(steps)))
        blocks = [*reading.others]
        if others := reading.new_steps[len(steps) :]:
            block = Block(others[0].step, others[-1].step, len(others))
            blocks.append(block)
        for block in blocks:
            self._blocks[name] = block.joined(self._blocks.get(name))
        for first, last in reading.gaps:
            self._gaps[name] = self._gaps.get(name, (first,))[0], last
        if (blocks or reading.gaps) and self._blocks_thinning.due():
            self._write_blocks(step)

    def _tell_scale(self, name, reading):
        rows = self._waiting[name]
        start, *points = reading.points
        if name not in self._closed:
            rows.append(start)
            self._closed[name] = False
        for point in points:
            changed = point.scale != start.scale
            if changed or point.skipped != start.skipped:
                # Between two readings without a change only the last counts.
                if rows and self._closed[name] and not changed:
                    rows.pop()
                rows.append(point)
                self._closed[name] = not changed
            start = point
        if len(rows) and self._rows_thinning.due():
            self._write_rows(reading.step)

    def _write_rows(self, step):
        for name, rows in self._waiting.items():
            if rows:
                self._log.scale_rows(step, rows, name)
        self._waiting.clear()

    def _write_blocks(self, step):
        for name, block in self._blocks.items():
            event = {"kind": "skipped_steps_not_kept", "optimizer": name}
            self._log.event(step, event | dataclasses.asdict(block))
        for name, (first, last) in self._gaps.items():
            event = {"kind": "loss_scale_not_known", "optimizer": name}
            steps = {"first_step": first, "last_step": last}
            self._log.event(step, event | steps)
        self._blocks.clear()
        self._gaps.clear()


def _rows(steps):
    return [
        {
            "step": step.step,
            "loss scale": format_power(step.scale),
            "loss": ", ".join(step.loss) or "",
            "non-finite gradients": ", ".join(
                _with_kinds(path, step.kinds.get(path))
                for path in step.variables[:5]
            )
            + (f" and {n} more" if (n := len(step.variables) - 5) > 0 else ""),
        }
        for step in steps
    ]


def _with_kinds(path, kinds):
    return f"{path} ({', '.join(kinds)})" if kinds else path
