"""The range of each layer's numbers over a run.

The log has the largest magnitude of a reading as headroom, and the smallest
magnitude that counts in the histograms of exponents.
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

# The exponent at which histograms count infinities and NaNs.
_NONFINITE = 128

# Elements may become zero if the rest keeps this share of the sum of squares.
# The diagnosis asks the same of gradients.
KEPT_ENERGY = 0.99


def run_ranges(run, columns: int = MAX_COLUMNS) -> dict:
    """Returns the ranges of all layers of a run, ready for JSON.

    Args:
        run: `Run`.
        columns: Int. The maximum number of columns to read of each metric.

    Returns:
        Dict with

        - `"overflowing_scale"`: the least loss scale at which a step was
          skipped since dtypes last changed, as a power of two, or `None`;
        - `"needed_scale"`: the loss scale in the last verdict that names one;
        - `"layers"`: a dict by path. It has a range for each measured part,
          `"refused"`, the kinds of verdicts that each format does not repair,
          and `"in_float32"`, the logarithm of the largest float32 output in
          its last verdict.

        A range has `"largest"`, the logarithm of the largest magnitude, and
        `"low"`, the exponent of the smallest magnitude that counts, each with
        its step. Gradients do not include the loss scale.
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
    """Yields part, `"largest"` or `"low"`, row, and pairs of step and bits."""
    limit = _limits(layers)
    scale = _scale_bits(run.scale, begins)
    for part in PARTS:
        scaled = part == "gradient"
        # The log does not say which optimizer trains which layer.
        if scaled and len(run.scale) > 1:
            continue
        shift = scale if scaled else lambda step: 0.0
        for row, steps, bits in _finite_headroom(run, part, columns):
            pairs = zip(steps, bits, strict=True)
            largest = [(s, limit(s) - left - shift(s)) for s, left in pairs]
            yield part, "largest", row, largest
    for row in run.histogram_rows():
        part, step = row["part"], row["step"]
        low = smallest_that_counts(row["exponents"], row["counts"])
        if low is None or (part == "gradient" and len(run.scale) > 1):
            continue
        low -= scale(step) if part == "gradient" else 0
        yield part, "low", row["layer"], [(step, low)]


def smallest_that_counts(exponents, counts) -> int | None:
    """Returns the smallest exponent that is needed to keep `KEPT_ENERGY`.

    Args:
        exponents: List of ints, rising.
        counts: List of ints, the number of magnitudes at each exponent.

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
    # NumPy would take five times as long for 40 numbers.
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
    """A function from a step to the limit that headroom referred to."""
    changes = sorted({since for x in layers for since, _ in x["dtypes"]})
    limits = []
    for since in changes or [0]:
        then = [{"compute_dtype": dtype_at(x, since + 1)} for x in layers]
        limits.append(format_limits(measured_against(then))["maximum_bits"])

    def limit(step):
        return limits[max(bisect.bisect_left(changes, step) - 1, 0)]

    return limit


def _since_calls(layers, begins):
    """The table of layers, with dtypes from the start of their `fit`.

    A later call of `fit` writes its table one step after its start.
    """

    def since(step):
        return step - 1 if step - 1 in begins else step

    return [
        layer | {"dtypes": [[since(s), d] for s, d in layer["dtypes"]]}
        for layer in layers
    ]


def _scale_bits(courses, begins):
    """A function from a step to the loss scale, as a power of two.

    A call of `fit` without a loss scale does not inherit an earlier one.
    """
    course = courses[0] if courses else {"steps": [], "scale": []}
    steps, scales = course["steps"], course["scale"]

    def bits(step):
        if not steps:
            return 0.0
        # A skipped step changes the scale of the next step.
        place = max(bisect.bisect_right(steps, step - 1) - 1, 0)
        call = bisect.bisect_right(begins, step - 1) - 1
        if call >= 0 and steps[place] < begins[call]:
            return 0.0
        scale = scales[place]
        return math.log2(scale) if 0 < scale < math.inf else 0.0

    return bits


def _add_verdict(own, verdict):
    """Adds the formats that a verdict rules out, and its largest output."""
    kind = kind_of(verdict["verdict"])
    for dtype in CHOICES if kind.repaired_by else ():
        kinds = own.setdefault("refused", {}).setdefault(dtype, [])
        if kind.name not in kinds and not is_repaired(kind.name, dtype):
            kinds.append(kind.name)
    largest = verdict.get("numbers", {}).get("largest_output_in_float32")
    if isinstance(largest, int | float) and 0 < largest < math.inf:
        own["in_float32"] = math.log2(largest)


def _lowest_overflowing(run, since):
    """The least loss scale at which only gradients were not finite.

    Non-finite losses and batches do not depend on the scale. Steps up to
    `since` had other dtypes.
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
