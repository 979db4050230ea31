"""Layers whose numbers grow from audit to audit, until they overflow."""

import math
from collections import deque

from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.compare import largest
from keras_mixprec.formats import get_format
from keras_mixprec.numerics.arrays import to_array
from keras_mixprec.numerics.twin import Twin

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
            tensors += Twin(call).inputs
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
