"""Which batches of skipped steps had bad data."""

import dataclasses

from keras_mixprec.diagnosis.advice import advice
from keras_mixprec.diagnosis.bad_samples import numbers_of_samples
from keras_mixprec.diagnosis.verdict import Verdict
from keras_mixprec.reporting.bad_batches import (
    LISTED,
    bad_batches,
    format_places,
)

# Batches that are kept.
_KEPT = 1000


class BadData:
    """Collects the batches of skipped steps whose inputs were not finite.

    Attributes:
        count: Int. How many there were, those apart that the optimizer no
            longer remembers in full.
        batches: List of dicts, the first 1,000. `"epoch"` and `"batch"` count
            from 0, as in callbacks, and `"step"` counts from 1. `"rows"` has
            the first bad row of each part of the batch, from 0.
    """

    def __init__(self):
        self.count = 0
        self.batches = []
        self._epochs = [(0, 0)]
        self._all_known = True
        # Scales to put back as soon as no step is under way.
        self._fallen: dict[str, float] = {}

    def begin_epoch(self, step: int, epoch: int):
        """An epoch begins, after this step.

        Args:
            step: Int.
            epoch: Int, counted from 0.
        """
        self._epochs.append((step, epoch))

    def put_scales_back(self, watch, readings: dict) -> dict:
        """Notes bad batches, and restores loss scales that they lowered.

        Bad data do not show which scale the gradients need. The compiled step
        lowers the scale all the same, because it follows its update rule.

        Args:
            watch: The `Watch`.
            readings: Dict from the name of an optimizer to its `Reading`.

        Returns:
            The readings, with the loss scales that were put back.
        """
        self._add(readings.values())
        if not (watch.tuning and watch.tuning.keeps_scale):
            return readings
        fallen = {n: r.points[0].scale for n, r in readings.items() if _fell(r)}
        fallen |= {
            n: scale
            for n, scale in self._fallen.items()
            if n in readings and _is_bad_data_alone(readings[n])
        }
        self._fallen = {}
        if watch.is_before_step:
            self._fallen = fallen
            return readings
        if fallen:
            watch.synchronized_model()
        readers = watch.counters.used()
        for name, scale in fallen.items():
            readers[name].set_scale(watch.step, scale)
            event = {"kind": "loss_scale_kept", "scale": scale}
            watch.log.event(watch.step, event)
            again = readers[name].read(watch.step)
            readings[name] = readings[name].continued(again)
        return readings

    def report(self, watch):
        """Reports bad data, the first time; the verdict has all batches.

        Args:
            watch: The `Watch`.
        """
        known = watch.examiner.has_reported("bad_data")
        if self.batches and not known:
            watch.examiner.report([self._verdict(watch.model)])
        for verdict in watch.verdicts if self.batches else ():
            if verdict.kind == "bad_data":
                places = format_places(self.batches, self.count)
                verdict.numbers["batches"] = places

    def located(self, watch, verdict: Verdict, step: int | None) -> Verdict:
        """Returns a diagnosis' verdict with the places of bad data.

        Steps that were skipped before are reported first.

        Args:
            watch: The `Watch`.
            verdict: `Verdict`.
            step: Int. The step of the batch, `None` if that is not known.
        """
        if not watch.several_workers:
            watch.counter_log.read(watch.step)
        place = None if step is None else self._place(step)
        at = verdict.step if step is None else step
        numbers = _numbers(watch.model, place, verdict.numbers)
        return dataclasses.replace(verdict, step=at, **numbers)

    def events(self) -> list:
        """Returns the event that names the bad batches at the end."""
        if not self.count:
            return []
        event = {"kind": "bad_batches", "count": self.count}
        listed = {"batches": self.batches[:LISTED]}
        return [event | {"message": str(self)} | listed]

    def _add(self, readings):
        """Takes note of readings of all optimizers, at one step."""
        self._all_known &= not any(reading.others for reading in readings)
        # A batch may be bad for several optimizers.
        bad = {
            skipped.step: skipped
            for reading in readings
            for skipped in reading.new_steps
            if skipped.inputs
        }
        self.count += len(bad)
        room = max(_KEPT - len(self.batches), 0)
        self.batches += [self._locate(bad[step]) for step in sorted(bad)[:room]]

    def _verdict(self, model):
        first = self.batches[0]
        rows = {f"rows_of_{part}": [n] for part, n in first["rows"].items()}
        places = {"batches": format_places(self.batches, self.count)}
        numbers = _numbers(model, first, places | rows)
        return Verdict("bad_data", step=first["step"], **numbers)

    def __str__(self):
        return bad_batches(self.batches, self.count, self._all_known)

    def _locate(self, skipped):
        return self._place(skipped.step) | {"rows": skipped.inputs}

    def _place(self, step):
        start, epoch = max(e for e in self._epochs if e[0] < step)
        return {"epoch": epoch, "batch": step - 1 - start, "step": step}


def _numbers(model, place, numbers):
    """The fields of a verdict about bad data."""
    own = numbers_of_samples(model)
    if own:  # Rows of a batch say less.
        numbers = {k: numbers[k] for k in numbers if "rows_of_" not in k}
    if place:
        numbers = {k: place[k] for k in ("epoch", "batch")} | numbers
    numbers = numbers | own
    text = advice("bad_data", **numbers)
    # Readings run without compilation.
    return {"numbers": numbers, "advice": text, "compiled": False}


def _fell(reading):
    """Returns whether bad data alone lowered a scale."""
    skipped = reading.new_steps and _is_bad_data_alone(reading)
    return bool(skipped) and reading.loss_scale < reading.points[0].scale


def _is_bad_data_alone(reading):
    """Returns whether no other step was skipped."""
    return all(s.inputs for s in reading.new_steps) and not reading.others
