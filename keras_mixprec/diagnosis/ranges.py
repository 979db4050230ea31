"""Headroom, zeros and subnormals of each layer, and overflows to come."""

import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.compare import largest
from keras_mixprec.formats import SIXTEEN_BITS, Format, get_format
from keras_mixprec.metrics import PROBED
from keras_mixprec.numerics.arrays import to_array
from keras_mixprec.numerics.layer_replay import LayerReplay
from keras_mixprec.numerics.probed_step import LayerReading
from keras_mixprec.numerics.statistics import Statistics

# A column is named after the part and one of these.
_MEASURES = {
    "headroom_bits": lambda s, limits: s.headroom_bits(limits),
    "nonfinite": lambda s, limits: s.nonfinite,
    "zero": lambda s, limits: s.zero,
    "subnormal": lambda s, limits: s.subnormal(limits),
    "below": lambda s, limits: s.below(limits),
}
_PARTS = ("activation", "gradient", "weight_gradient")


def heat(readings: Sequence[LayerReading], limits: Format) -> np.ndarray:
    """Returns the numbers of a probed step, a row for each layer call.

    Args:
        readings: List of `LayerReading`.
        limits: `Format` that the numbers refer to.

    Returns:
        Float32 array `(len(readings), len(PROBED))`: headroom in bits,
        non-finite elements as a count, shares of elements that are zero,
        subnormal and below all numbers of the format; NaN where nothing was
        measured.
    """
    every = list(_MEASURES.values())
    columns = [_columns(readings, part, every, limits) for part in _PARTS]
    columns.append(_columns(readings, "weight", every[:1], limits))
    lost = [[reading.lost_updates] for reading in readings]
    columns.append(np.array(lost, "float32").reshape(len(readings), 1))
    return np.hstack(columns).astype("float32")


def _columns(readings, part, measures, limits):
    columns = np.full((len(readings), len(measures)), np.nan)
    held = [part in reading.parts for reading in readings]
    if any(held):
        found = Statistics.stacked(
            [r.parts[part] for r in readings if part in r.parts]
        )
        measured = [measure(found, limits) for measure in measures]
        columns[held] = np.stack(measured, axis=1)
    return columns


def in_16_bits(readings: Sequence[LayerReading], dtypes: dict) -> np.ndarray:
    """Returns which of the layers compute in 16 bits, as far as is known.

    What others hold beyond the range of 16 bits is no finding.

    Args:
        readings: List of `LayerReading`.
        dtypes: Dict from layer path to compute dtype.
    """
    return np.array(
        [_dtype(r.path, dtypes) in (*SIXTEEN_BITS, None) for r in readings],
        bool,
    )


def curves(table: np.ndarray, narrow: np.ndarray) -> dict[str, float]:
    """Returns what the worst layer's numbers are, by name.

    Args:
        table: Array, as `heat` returns it.
        narrow: Boolean array, which of its rows are about layers in 16 bits.

    Returns:
        Dict with the smallest headroom, the largest share of subnormal
        gradients and of lost updates, and how many layers had non-finite
        numbers; without what was measured of no layer.
    """
    column = dict(zip(PROBED, table.T, strict=True))
    own = {name: column[name][narrow] for name in PROBED}
    own["lost_updates"] = column["lost_updates"]
    worst = {
        "activation_headroom_bits": _finite_min,
        "gradient_headroom_bits": _finite_min,
        "weight_headroom_bits": _finite_min,
        "gradient_subnormal": _finite_max,
        "weight_gradient_below": _finite_max,
        "lost_updates": _finite_max,
    }
    found = {name: pick(own[name]) for name, pick in worst.items()}
    found = {name: value for name, value in found.items() if value is not None}
    bad = [column[f"{part}_nonfinite"] > 0 for part in _PARTS]
    return found | {"nonfinite_layers": float(np.any(bad, axis=0).sum())}


def least_headroom(
    readings: Sequence[LayerReading], dtypes: dict, part: str
) -> tuple[str, float] | None:
    """Returns the path and headroom of the layer that has least, or `None`.

    Of layers in 16 bits, each in the format that it computes in.

    Args:
        readings: List of `LayerReading`.
        dtypes: Dict from layer path to compute dtype.
        part: String, as in `LayerReading.parts`.
    """
    found = [
        (r.parts[part].headroom_bits(get_format(dtype)), r.path)
        for r in readings
        if part in r.parts
        and r.parts[part].largest
        and (dtype := _dtype(r.path, dtypes)) in SIXTEEN_BITS
    ]
    if not found:
        return None
    bits, path = min(found)
    return path, bits


def _dtype(path, dtypes):
    # The path of a second call ends with "#1".
    return dtypes.get(path) or dtypes.get(path.rpartition("#")[0])


def _finite_min(values):
    values = values[np.isfinite(values)]
    return float(values.min()) if values.size else None


def _finite_max(values):
    values = values[np.isfinite(values)]
    return float(values.max()) if values.size else None


class Trend:
    """The headroom of one layer over the last probed steps.

    Wortsman et al., 2023 (arXiv 2309.14322) predict instabilities from how
    activation norms grow; an overflow is where the line through their
    logarithms meets the format's maximum.
    """

    def __init__(self):
        self._points = deque(maxlen=thresholds.TREND_POINTS)

    def add(self, step: int, headroom_bits: float) -> float | None:
        """Adds a probed step.

        Args:
            step: Int.
            headroom_bits: Float. Negative or zero if it overflows already.

        Returns:
            Float. In about how many steps it overflows if it goes on like
            this, `None` if nothing says that it does, or not soon.
        """
        if not math.isfinite(headroom_bits):
            return None
        self._points.append((step, headroom_bits))
        if len(self._points) < thresholds.TREND_POINTS:
            return None
        first, slope, now, spread = _line(self._points)
        fallen = slope * first
        if slope >= 0 or fallen < thresholds.TREND_SPREADS * spread:
            return None
        left = max(now, 0.0) / -slope
        return left if left <= thresholds.TREND_AHEAD * -first else None


def _line(points):
    """The first step as seen from the last, and the line of least squares.

    Of eight points, as here, in a tenth of the time that `np.polyfit` takes.
    """
    count, (last, _) = len(points), points[-1]
    center = sum(step for step, _ in points) / count
    mean = sum(bits for _, bits in points) / count
    pairs = [(step - center, bits - mean) for step, bits in points]
    slope = sum(x * y for x, y in pairs) / sum(x * x for x, _ in pairs)
    spread = sum((y - slope * x) ** 2 for x, y in pairs) / count
    now = mean + slope * (last - center)
    return points[0][0] - last, slope, now, math.sqrt(spread)


# A line through fewer audits is a coincidence too often.
_POINTS = 3


def headroom(calls) -> dict:
    """Returns how far a layer's numbers are from overflowing, in bits.

    What it is given counts as what it returns, unless it is not cast.

    Args:
        calls: List of `LayerCall` of a step in float32, of layers that compute
            in 16 bits otherwise.

    Returns:
        Dict from path to bits, as by the largest number of all its calls.
    """
    found = {}
    for call in calls:
        tensors = [*call.float_outputs]
        if call.layer.autocast:
            tensors += LayerReplay(call).inputs
        size = largest([*map(to_array, tensors)])
        if size:
            limits = get_format(call.layer.compute_dtype)
            bits = math.log2(limits.maximum) - math.log2(size)
            found[call.path] = min(bits, found.get(call.path, bits))
    return found


class Growth:
    """Foresees overflows from the headroom at several audits.

    A layer is about to overflow if its headroom fell from audit to audit, less
    is left than the next batch may take, and the line leads to zero soon.
    """

    def __init__(self):
        self._points = {}

    def add(self, step: int, headroom: dict):
        """Adds an audit.

        Args:
            step: Int.
            headroom: Dict from path to bits.
        """
        # Another `fit` may count from 0 again.
        if any(step < points[-1][0] for points in self._points.values()):
            self._points = {}
        self._points = {
            path: deque(self._points.get(path, ()), _POINTS)
            for path in headroom
        }
        for path, bits in headroom.items():
            points = self._points[path]
            if points and points[-1][0] == step:
                points.pop()
            points.append((step, bits))

    def steps_left(self) -> dict:
        """Returns, by path, in how many steps the layers overflow that will.

        Each as a pair with the bits that are left now.
        """
        found = {path: _left(points) for path, points in self._points.items()}
        return {path: left for path, left in found.items() if left}

    def about_to_overflow(self) -> dict:
        """Returns those of `steps_left` that the next batch may make do so."""
        return {
            path: (steps, bits)
            for path, (steps, bits) in self.steps_left().items()
            if bits < thresholds.BITS_ABOVE
        }


def _left(points):
    """Steps and bits left along the line, `None` if it leads nowhere near."""
    bits = [bits for _, bits in points]
    falls = all(a > b for a, b in zip(bits, bits[1:], strict=False))
    if len(bits) < _POINTS or not falls or bits[-1] < 0:
        return None
    length = points[-1][0] - points[0][0]
    steps = bits[-1] * length / (bits[0] - bits[-1])
    soon = steps <= thresholds.TREND_AHEAD * length
    return (steps, bits[-1]) if soon else None
