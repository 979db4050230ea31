"""The range of each layer's numbers over a run.

From the log alone: the largest magnitude of a reading from its headroom, the
smallest that counts from the histograms of exponents.
"""

import bisect
import collections
import math
from collections.abc import Iterator

import numpy as np

from keras_mixprec.reporting.facts import dtype_at, is_repaired, kind_of, moment
from keras_mixprec.reporting.format_limits import (
    CHOICES,
    format_limits,
    measured_against,
)
from keras_mixprec.reporting.grid import MAX_COLUMNS, as_sent
from keras_mixprec.reporting.layer_tables import layer_of
from keras_mixprec.reporting.layers import with_changes

PARTS = ("activation", "gradient", "weight_gradient", "weight")

# Where histograms count infinities and NaNs: no finite float32 is that large.
_NONFINITE = 128

# What is smaller than the elements that add up to this share of the sum of
# squares may become zero: the share that the diagnosis asks gradients to keep.
KEPT_ENERGY = 0.99


def run_ranges(run, columns: int = MAX_COLUMNS) -> dict:
    """Returns the ranges of all layers of a run, ready for JSON.

    Args:
        run: `Run`.
        columns: Int. The most steps of each metric to look at, the worst of
            each stretch.

    Returns:
        Dict with `"overflowing_scale"`, the least loss scale, as a power of
        two, at which steps were skipped since dtypes last changed, `None` if
        none was;
        `"needed_scale"`, the one that the last verdict on it starts from, as a
        power of two; and
        `"layers"`: by path a dict of the parts that were measured, each with
        its range; `"refused"`, by format the kinds of verdict on it
        that the format does not repair; and `"in_float32"`, the logarithm of
        the largest output that its last verdict found in float32. A range is a
        dict of `"largest"`, the logarithm of the largest magnitude, and
        `"low"`, the exponent of the smallest magnitude that counts, each with
        its step.
        Gradients are without the loss scale.
    """
    begins = sorted(event["step"] for event in run.begins)
    layers = _since_calls(with_changes(run.table, run.events), begins)
    paths = {layer["path"] for layer in layers}
    found: dict = collections.defaultdict(dict)
    for part, name, row, pairs in _readings(run, layers, begins, columns):
        own = found[layer_of(row, paths)].setdefault(part, {})
        own.setdefault(name, []).extend(pairs)
    for own in found.values():
        for part, readings in own.items():
            own[part] = _reading("largest", readings, max)
            own[part] |= _reading("low", readings, min)
    verdicts = run.of_kind("verdict")
    for verdict in verdicts:
        _add_verdict(found[verdict["layer"]], verdict)
    found.pop(None, None)
    needed = [v.get("numbers", {}).get("needed_bits") for v in verdicts]
    needed = [bits for bits in needed if isinstance(bits, int | float)]
    changed = max((s for x in layers for s, _ in x["dtypes"][1:]), default=-1)
    return {
        "layers": {path: own for path, own in found.items() if own},
        "overflowing_scale": _lowest_overflowing(run, changed),
        "needed_scale": needed[-1] if needed else None,
    }


def _readings(run, layers, begins, columns) -> Iterator[tuple]:
    """The part, `"largest"` or `"low"`, the row, and pairs of step and bits."""
    limit = _limits(layers)
    scale = _scale_bits(run.scale, begins)
    for part in PARTS:
        scaled = part == "gradient"
        # Of several optimizers, whose layers are whose the log does not say.
        if scaled and len(run.scale) > 1:
            continue
        shift = scale if scaled else lambda step: 0.0
        for row, steps, bits in _finite_headroom(run, part, columns):
            pairs = zip(steps, bits, strict=True)
            largest = [(s, limit(s) - left - shift(s)) for s, left in pairs]
            yield part, "largest", row, largest
        for row, taken in run.histograms.get(part, {}).items():
            low = [
                (x["step"], smallest_that_counts(x["exponents"], x["counts"]))
                for x in taken
            ]
            known = [(s, e - shift(s)) for s, e in low if e is not None]
            yield part, "low", row, known


def smallest_that_counts(exponents, counts) -> int | None:
    """Returns the exponent down to which numbers add up to the energy to keep.

    Args:
        exponents: List of ints, rising.
        counts: List of the number of magnitudes from `2**exponent` on.

    Returns:
        Int, `None` if there are no finite numbers.
    """
    finite = [
        (exponent, count)
        for exponent, count in zip(exponents, counts, strict=True)
        if count > 0 and exponent < _NONFINITE
    ]
    if not finite:
        return None
    # Of 40 numbers NumPy takes five times as long; a model has 40,000 of these.
    top = finite[-1][0]
    energies = [count * 4.0 ** (e - top) for e, count in finite]
    wanted, kept = KEPT_ENERGY * sum(energies), 0.0
    for (exponent, _), energy in zip(finite[::-1], energies[::-1], strict=True):
        kept += energy
        if kept >= wanted:
            return exponent
    return finite[0][0]


def _reading(name, readings, pick):
    pairs = readings.get(name)
    if not pairs:
        return {name: None, f"{name}_step": None}
    step, value = pick(pairs, key=lambda pair: pair[1])
    return {name: round(float(value), 3), f"{name}_step": step}


def _finite_headroom(run, part, columns):
    """Rows with the steps and headroom of their finite readings."""
    grid = _grid(run, f"{part}_headroom_bits", columns)
    if grid is None:
        return
    counts = _grid(run, f"{part}_nonfinite", columns)
    bad = np.zeros(grid.worst.shape, bool)
    if counts is not None and counts.worst.shape == bad.shape:
        bad = counts.worst > 0
    steps = np.asarray(grid.last)
    for row, bits, lost in zip(grid.layers, grid.worst, bad, strict=True):
        known = np.isfinite(bits) & ~lost
        yield row, steps[known].tolist(), as_sent(bits[known]).tolist()


def _limits(layers):
    """A function from a step to what headroom was measured against at it."""
    changes = sorted({since for x in layers for since, _ in x["dtypes"]})
    limits = []
    for since in changes or [0]:
        then = [{"compute_dtype": dtype_at(x, since + 1)} for x in layers]
        limits.append(format_limits(measured_against(then))["maximum_bits"])

    def limit(step):
        return limits[max(bisect.bisect_left(changes, step) - 1, 0)]

    return limit


def _since_calls(layers, begins):
    """The table of layers, with dtypes since the call of `fit` that set them.

    The table of a later call is written one step behind its beginning, because
    that step has been written at the end of the call before.
    """

    def since(step):
        return step - 1 if step - 1 in begins else step

    return [
        layer | {"dtypes": [[since(s), d] for s, d in layer["dtypes"]]}
        for layer in layers
    ]


def _scale_bits(courses, begins):
    """A function from a step to the power of two of the loss scale it had.

    One without a scale in a call of `fit` had none, whatever an earlier call
    ended with.
    """
    course = courses[0] if courses else {"steps": [], "scale": []}
    steps, scales = course["steps"], course["scale"]

    def bits(step):
        if not steps:
            return 0.0
        # A skipped step changes the scale for those behind it.
        place = max(bisect.bisect_right(steps, step - 1) - 1, 0)
        call = bisect.bisect_right(begins, step - 1) - 1
        if call >= 0 and steps[place] < begins[call]:
            return 0.0
        scale = scales[place]
        return math.log2(scale) if 0 < scale < math.inf else 0.0

    return bits


def _add_verdict(own, verdict):
    """Which formats a verdict asks to leave, and how large what overflowed is.

    What 16 bits cannot hold, no format of 8 bits can.
    """
    kind = kind_of(verdict["verdict"])
    for dtype in CHOICES if kind.repaired_by else ():
        kinds = own.setdefault("refused", {}).setdefault(dtype, [])
        if kind.name not in kinds and not is_repaired(kind.name, dtype):
            kinds.append(kind.name)
    largest = verdict.get("numbers", {}).get("largest_output_in_float32")
    if isinstance(largest, int | float) and 0 < largest < math.inf:
        own["in_float32"] = math.log2(largest)


def _lowest_overflowing(run, since):
    """The least loss scale at which gradients alone were not finite.

    A loss that is not finite, or a batch, says nothing of the scale; steps up
    to `since` are of other dtypes.
    """
    scales = [
        event["scale"]
        for event in run.of_kind("skipped_step")
        if not (event.get("bad_input") or event.get("loss"))
        and moment(event) > since
        and isinstance(event.get("scale"), int | float)
        and 0 < event["scale"] < math.inf
    ]
    return math.log2(min(scales)) if scales else None


def _grid(run, metric, columns):
    try:
        return run.grid(metric, columns)
    except KeyError:
        return None
