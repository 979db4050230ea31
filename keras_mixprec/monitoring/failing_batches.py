"""Which batches of skipped steps had bad data."""

import dataclasses
import itertools
import math
import re

import keras
import numpy as np

from keras_mixprec.diagnosis.advice import advice
from keras_mixprec.diagnosis.batch import named_leaves
from keras_mixprec.diagnosis.verdict import Finding, Verdict
from keras_mixprec.formats import BATCHES
from keras_mixprec.keras_internals import arrays_in_fit
from keras_mixprec.loss_scaling.inputs import PARTS
from keras_mixprec.numerics.arrays import as_numpy

# Samples, and stretches of batches, that a text lists; batches that are kept.
_LISTED = 8
_KEPT = 1000

# Bytes of the user's arrays that are looked at in one go, and in all: they may
# be mapped from a file that is larger than the memory.
_SLICE, _MOST = 2**24, 2**30


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
        """Takes note of what was read and undoes what bad data did.

        They say nothing of the scale that gradients need. Not within the step,
        which follows its update rule to the letter.

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
        numbers, own = dict(verdict.numbers), _numbers_of_samples(watch.model)
        if own:
            numbers = {k: numbers[k] for k in numbers if "rows_of_" not in k}
        if step is not None:
            place = self._place(step)
            numbers = {k: place[k] for k in ("epoch", "batch")} | numbers
        numbers |= own
        return dataclasses.replace(
            verdict,
            step=verdict.step if step is None else step,
            compiled=False,  # Readings run without compilation.
            numbers=numbers,
            advice=advice("bad_data", **numbers),
        )

    def events(self) -> list:
        """Returns what there is to log at the end: which batches they were."""
        if not self.count:
            return []
        event = {"kind": "bad_batches", "count": self.count}
        listed = {"batches": self.batches[:_LISTED]}
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
        numbers = {name: first[name] for name in ("epoch", "batch")}
        numbers["batches"] = format_places(self.batches, self.count)
        samples = _numbers_of_samples(model)
        numbers |= samples
        if not samples:
            for part, row in first["rows"].items():
                numbers[f"rows_of_{part}"] = [row]
        return Verdict(
            "bad_data",
            step=first["step"],
            numbers=numbers,
            advice=advice("bad_data", **numbers),
        )

    def __str__(self):
        if not self.count:
            return ""
        least = "" if self._all_known else "at least "
        first = self.batches[0]
        rows = " and ".join(f"row {r} of {x}" for x, r in first["rows"].items())
        return (
            f"Non-finite inputs in {least}{self.count:,} "
            f"{BATCHES[self.count > 1]}: "
            f"{format_places(self.batches, self.count)}. The first is at step "
            f"{first['step']:,}, in {rows} of that batch. Epochs, batches and "
            "rows count from 0, steps from 1."
        )

    def _locate(self, skipped):
        return self._place(skipped.step) | {"rows": skipped.inputs}

    def _place(self, step):
        start, epoch = max(e for e in self._epochs if e[0] < step)
        return {"epoch": epoch, "batch": step - 1 - start, "step": step}


def _fell(reading):
    """Returns whether bad data alone lowered a scale."""
    skipped = reading.new_steps and _is_bad_data_alone(reading)
    return bool(skipped) and reading.loss_scale < reading.points[0].scale


def _is_bad_data_alone(reading):
    """Returns whether no other step was skipped."""
    return all(s.inputs for s in reading.new_steps) and not reading.others


def format_places(batches: list, count: int) -> str:
    """Formats which batches of which epochs, consecutive ones as a stretch.

    Args:
        batches: List of dicts, as `BadData.batches`.
        count: Int. How many there are, those that are not in the list as well.

    Example:
    >>> from keras_mixprec.monitoring.failing_batches import format_places
    >>> at = [{"epoch": 1, "batch": batch} for batch in (3, 17, 20, 21, 22)]
    >>> format_places(at, 17)
    'epoch 1, batches 3, 17, 20-22 and 12 more'
    """
    stretches = []
    for place in batches:
        epoch, batch = place["epoch"], place["batch"]
        if stretches and stretches[-1][::2] == [epoch, batch - 1]:
            stretches[-1][2] = batch
        else:
            stretches.append([epoch, batch, batch])
    listed = []
    for epoch, own in itertools.groupby(stretches[:_LISTED], lambda s: s[0]):
        spans = [(first, last) for _, first, last in own]
        count -= sum(last - first + 1 for first, last in spans)
        several = len(spans) > 1 or spans[0][0] < spans[0][1]
        names = ", ".join(f"{a}-{b}" if a < b else f"{a}" for a, b in spans)
        listed.append(f"epoch {epoch}, {BATCHES[several]} {names}")
    return "; ".join(listed) + (f" and {count:,} more" if count else "")


def bad_data_behind(model, examination) -> Finding | None:
    """Returns what is wrong with the arrays of `fit` where weights are lost.

    Args:
        model: The `keras.Model`, in `fit`.
        examination: `Examination`.
    """
    verdicts = [finding.verdict for finding in examination.findings]
    if [verdict.kind for verdict in verdicts] != ["weights_lost"]:
        return None
    numbers, kind = _numbers_of_samples(model), "bad_data"
    if not numbers:
        return None
    step, text = verdicts[0].step, advice(kind, **numbers)
    return Finding(Verdict(kind, step=step, numbers=numbers, advice=text), [])


def _numbers_of_samples(model):
    numbers = {}
    for part, (indices, all_known) in bad_samples(model).items():
        numbers[f"samples_of_{part}"] = indices[:_LISTED].tolist()
        if all_known:
            numbers[f"bad_samples_of_{part}"] = len(indices)
    return numbers


def bad_samples(model) -> dict:
    """Returns which samples of the arrays given to `fit` are not finite.

    Args:
        model: The `keras.Model`, in `fit`.

    Returns:
        Dict from `"x"`, `"y"` and `"sample_weight"` to an array of indices, and
        whether these are all. Of several arrays each has its key, as
        `"x['age']"`. Indices count in the order of the user's arrays, shuffled
        or not. Empty if `fit` was given no arrays.
    """
    arrays = arrays_in_fit(model)
    if arrays is None:
        return {}
    found = {}
    parts = keras.utils.unpack_x_y_sample_weight(arrays)
    for name, leaf in named_leaves(**dict(zip(PARTS, parts, strict=True))):
        rows, are_all = _bad_rows(leaf)
        if rows:
            found[name] = np.array(rows), are_all
    return found


def _bad_rows(leaf):
    """The rows of an array that are not finite, and whether these are all."""
    dtype = str(getattr(leaf, "dtype", ""))
    if "float" not in dtype or not hasattr(leaf, "__array__"):
        return [], True
    count, found = len(leaf), []
    size = max(math.prod(leaf.shape[1:]) * _bytes_of(dtype), 1)
    step, most = max(_SLICE // size, 1), max(_MOST // size, 1)
    for start in range(0, min(count, most), step):
        rows = as_numpy(leaf[start : start + step])
        finite = np.isfinite(rows).reshape(len(rows), -1).all(axis=1)
        found += (start + np.flatnonzero(~finite)).tolist()
    return found, count <= most


def _bytes_of(dtype):
    return int(re.search(r"\d+", dtype)[0]) // 8
