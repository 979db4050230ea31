"""The range of each layer's numbers over a run.

From the log alone: the largest magnitude of a reading from its headroom, the
smallest that counts from the histograms of exponents.
"""

import bisect
import itertools
import math

import numpy as np

from keras_mixprec.reporting.facts import dtype_at, is_repaired
from keras_mixprec.reporting.format_limits import (
    CHOICES,
    format_limits,
    measured_against,
)
from keras_mixprec.reporting.grid import as_sent
from keras_mixprec.reporting.layer_tables import layer_of
from keras_mixprec.reporting.run_layers import add_events
from keras_mixprec.reporting.skipped_steps import lowest_overflowing_scale
from keras_mixprec.verdict_kinds import KINDS

PARTS = ("activation", "gradient", "weight_gradient", "weight")

# Where histograms count infinities and NaNs: no finite float32 is that large.
_NONFINITE = 128

# What is smaller than the elements that add up to this share of the sum of
# squares may become zero: the share that the diagnosis asks gradients to keep.
KEPT_ENERGY = 0.99


def run_ranges(data, columns: int) -> dict:
    """Returns the ranges of all layers of a run, ready for JSON.

    Args:
        data: `RunData`.
        columns: Int. The most steps of each metric to look at, the worst of
            each stretch.

    Returns:
        Dict with `"overflowing_scale"`, the least loss scale, as a power of
        two, at which steps were skipped since dtypes last changed, `None` if
        none was;
        `"needed_scale"`, the one that the last verdict on it starts from, as a
        power of two; and
        `"layers"`: by path a dict of the parts that were measured, each with
        its range, and `"nonfinite"`: the step at which
        it was the first layer whose activations were not finite, and the dtype
        it computed in then; `"refused"`, by format the kinds of verdict on it
        that the format does not repair; and `"in_float32"`, the logarithm of
        the largest output that its last verdict found in float32. A range is a
        dict of `"largest"`, the logarithm of the largest magnitude, and
        `"low"`, the exponent of the smallest magnitude that counts, each with
        its step.
        Gradients are without the loss scale.
    """
    events = data.events()
    begins = _begins(events)
    layers = data.layers()
    add_events(layers, events)  # A table is logged later than a change.
    layers = _since_calls(layers, begins)
    paths = {layer["path"] for layer in layers}
    limit = _limits(layers)
    changed = max((s for x in layers for s, _ in x["dtypes"][1:]), default=-1)
    courses, histograms = data.scale(), data.histograms()
    found: dict = {}

    def add(row, part, name, readings):
        own = found.setdefault(layer_of(row, paths), {})
        own.setdefault(part, {}).setdefault(name, []).extend(readings)

    for part in PARTS:
        shift = _no_shift
        if part == "gradient":
            # Whose layers are whose the log does not say.
            if len(courses) > 1:
                continue
            shift = _scale_bits(courses, begins)
        for row, steps, bits in _finite_headroom(data, part, columns):
            largest = [
                (step, limit(step) - left - shift(step))
                for step, left in zip(steps, bits, strict=True)
            ]
            add(row, part, "largest", largest)
        for row, taken in histograms.get(part, {}).items():
            low = [
                (x["step"], smallest_that_counts(x["exponents"], x["counts"]))
                for x in taken
            ]
            known = [(s, e - shift(s)) for s, e in low if e is not None]
            add(row, part, "low", known)
    ranges: dict = {
        path: {part: _worst(**readings) for part, readings in parts.items()}
        for path, parts in found.items()
    }
    for path, first in _first_nonfinite(data, layers, columns).items():
        ranges.setdefault(path, {})["nonfinite"] = first
    for path, kinds in _refused(events).items():
        ranges.setdefault(path, {})["refused"] = kinds
    for path, largest in _in_float32(events).items():
        ranges.setdefault(path, {}).update(largest)
    return {
        "run": data.name,
        "layers": ranges,
        "overflowing_scale": lowest_overflowing_scale(events, changed),
        "needed_scale": _needed_scale(events),
    }


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


def _worst(largest=(), low=()):
    """The largest and the smallest of the readings of a part."""
    return _reading("largest", largest, max) | _reading("low", low, min)


def _reading(name, pairs, pick):
    step, value = None, None
    if pairs:
        step, value = pick(pairs, key=lambda pair: pair[1])
        value = round(float(value), 3)
    return {name: value, f"{name}_step": step}


def _finite_headroom(data, part, columns):
    """Rows with the steps and headroom of their finite readings."""
    grid = _grid(data, f"{part}_headroom_bits", columns)
    if grid is None:
        return
    counts = _grid(data, f"{part}_nonfinite", columns)
    bad = np.zeros(grid.worst.shape, bool)
    if counts is not None and counts.worst.shape == bad.shape:
        bad = counts.worst > 0
    steps = np.asarray(grid.last)
    for row, bits, lost in zip(grid.layers, grid.worst, bad, strict=True):
        known = np.isfinite(bits) & ~lost
        yield row, steps[known].tolist(), as_sent(bits[known]).tolist()


def _no_shift(_step):
    return 0.0


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


def _begins(events):
    return sorted(e["step"] for e in events if e["kind"] == "train_begin")


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


def _first_nonfinite(data, layers, columns):
    """By path, the first step at which a layer was where it began.

    All layers behind one that overflows are not finite either, and all that
    hold it: of those only the innermost that comes first is to blame.
    """
    grid = _grid(data, "activation_nonfinite", columns)
    if grid is None:
        return {}
    known = {layer["path"]: layer for layer in layers}
    paths = [layer_of(row, known) for row in grid.layers]
    # "a/b/c" is in "a" and in "a/b".
    holders = {
        path: [*itertools.accumulate(path.split("/")[:-1], "{}/{}".format)]
        for path in paths
    }
    found: dict = {}
    for column, step in enumerate(np.asarray(grid.last).tolist()):
        (rows,) = np.nonzero(grid.worst[:, column] > 0)
        bad = [paths[row] for row in rows]
        around = {holder for path in bad for holder in holders[path]}
        first = next((path for path in bad if path not in around), None)
        if first in known and first not in found:
            dtype = dtype_at(known[first], step)
            found[first] = {"step": step, "dtype": dtype}
    return found


def _needed_scale(events):
    found = [
        event.get("numbers", {}).get("needed_bits")
        for event in events
        if event.get("verdict") == "scale_too_low"
    ]
    known = [bits for bits in found if isinstance(bits, int | float)]
    return known[-1] if known else None


def _refused(events):
    """By path and format, the verdicts that ask for another one.

    What 16 bits cannot hold, no format of 8 bits can.
    """
    found: dict = {}
    for event in events:
        kind = KINDS.get(event.get("verdict"))
        if event["kind"] == "verdict" and kind and kind.repaired_by:
            own = found.setdefault(event.get("layer"), {})
            for dtype in CHOICES:
                kinds = own.setdefault(dtype, [])
                new = kind.name not in kinds
                if new and not is_repaired(kind.name, dtype):
                    kinds.append(kind.name)
    return found


def _in_float32(events):
    """By path, how large what overflowed is where it does not."""
    found: dict = {}
    for event in events:
        largest = event.get("numbers", {}).get("largest_output_in_float32")
        known = event["kind"] == "verdict" and isinstance(largest, int | float)
        if known and 0 < largest < math.inf:
            found[event.get("layer")] = {"in_float32": math.log2(largest)}
    return found


def _grid(data, metric, columns):
    try:
        return data.grid(metric, columns)
    except KeyError:
        return None
