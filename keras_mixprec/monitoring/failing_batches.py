"""Finds bad data in the batches of skipped steps."""

import dataclasses

from keras_mixprec.diagnosis.advice import advice
from keras_mixprec.diagnosis.bad_samples import numbers_of_samples
from keras_mixprec.diagnosis.verdict import Verdict
from keras_mixprec.reporting.bad_batches import (
    LISTED,
    bad_batches,
    format_places,
)

_KEPT = 1000


class BadData:
    """Collects batches of skipped steps with non-finite inputs.

    Attributes:
        count: Int. The number of bad batches, as far as the optimizer has
            recorded them.
        batches: List of dicts for the first 1,000. `"epoch"` and `"batch"`
            count from 0, as in callbacks, and `"step"` counts from 1. `"rows"`
            has the first bad row of each part of the batch, from 0.
    """

    def __init__(self):
        self.count = 0
        self.batches = []
        self._epochs = [(0, 0)]
        self._all_known = True
        # Loss scales to restore as soon as no step is running.
        self._fallen: dict[str, float] = {}

    def begin_epoch(self, step: int, epoch: int):
        """Records the start of an epoch.

        Args:
            step: Int. Steps taken before the epoch.
            epoch: Int, counted from 0.
        """
        self._epochs.append((step, epoch))

    def put_scales_back(self, watch, readings: dict) -> dict:
        """Records bad batches and restores loss scales that they lowered.

        Bad data say nothing about the scale that the gradients need, but the
        update rule in the compiled step lowers the scale anyway.

        Args:
            watch: The `Watch`.
            readings: Dict from the name of an optimizer to its `Reading`.

        Returns:
            The readings, with the restored loss scales.
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
        """Reports bad data once, and keeps the verdict's batches up to date.

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
        """Returns a verdict with the epoch and batch of the bad data.

        Earlier skipped steps are reported first.

        Args:
            watch: The `Watch`.
            verdict: `Verdict`.
            step: Int. The step of the batch, or `None` if it is not known.
        """
        if not watch.several_workers:
            watch.counter_log.read(watch.step)
        place = None if step is None else self._place(step)
        at = verdict.step if step is None else step
        numbers = _numbers(watch.model, place, verdict.numbers)
        return dataclasses.replace(verdict, step=at, **numbers)

    def events(self) -> list:
        """Returns the event that lists the bad batches, if there are any."""
        if not self.count:
            return []
        event = {"kind": "bad_batches", "count": self.count}
        listed = {"batches": self.batches[:LISTED]}
        return [event | {"message": str(self)} | listed]

    def _add(self, readings):
        """Adds the bad batches in the readings of all optimizers."""
        self._all_known &= not any(reading.others for reading in readings)
        # Count a bad batch once, even if several optimizers have recorded the
        # batch.
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
    """Returns the fields of a verdict about bad data."""
    own = numbers_of_samples(model)
    if own:  # Sample indices are more useful than row numbers in a batch.
        numbers = {k: numbers[k] for k in numbers if "rows_of_" not in k}
    if place:
        numbers = {k: place[k] for k in ("epoch", "batch")} | numbers
    numbers = numbers | own
    text = advice("bad_data", **numbers)
    return {"numbers": numbers, "advice": text, "compiled": False}


def _fell(reading):
    """Returns whether only bad data lowered the loss scale."""
    skipped = reading.new_steps and _is_bad_data_alone(reading)
    return bool(skipped) and reading.loss_scale < reading.points[0].scale


def _is_bad_data_alone(reading):
    """Returns whether bad data explain all skipped steps."""
    return all(s.inputs for s in reading.new_steps) and not reading.others
