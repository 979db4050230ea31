"""Headroom, zeros and subnormals of each layer, from a reading."""

from collections.abc import Sequence

import numpy as np

from keras_mixprec.formats import SIXTEEN_BITS, Format
from keras_mixprec.metrics import PROBED
from keras_mixprec.numerics.range_reading import LayerReading
from keras_mixprec.numerics.statistics import Statistics

# A column of `PROBED` is named after the part and one of these.
_MEASURES = {
    "headroom_bits": lambda s, limits: s.headroom_bits(limits),
    "nonfinite": lambda s, limits: s.nonfinite,
    "zero": lambda s, limits: s.zero,
    "subnormal": lambda s, limits: s.subnormal(limits),
    "below": lambda s, limits: s.below(limits),
    "largest": lambda s, limits: np.where(s.nonfinite, np.inf, s.largest),
}
_PARTS = ("activation", "gradient", "weight_gradient")
# Columns whose worst number is drawn as a curve.
_WORST = (
    "activation_headroom_bits",
    "gradient_headroom_bits",
    "weight_headroom_bits",
    "gradient_subnormal",
    "weight_gradient_below",
    "lost_updates",
    "attention_logits_largest",
)
_WEIGHT_GRADIENT_ZERO = [*PROBED].index("weight_gradient_zero")

# This many readings in a row, over this many steps, make gradients of zero
# worth a diagnosis. The first readings are at steps 1, 2, 4, and so on, and a
# gate that starts at zero has moved before step 30.
_ZERO_READINGS = 3
_ZERO_STEPS = 30


def metrics_table(
    readings: Sequence[LayerReading], limits: Format
) -> np.ndarray:
    """Returns the numbers of a reading, a row for each layer call.

    Args:
        readings: List of `LayerReading`.
        limits: `Format` that the numbers refer to.

    Returns:
        Float32 array `(len(readings), len(PROBED))`: headroom in bits,
        non-finite elements as a count, shares of elements that are zero,
        subnormal and below all numbers of the format, the largest magnitude;
        NaN where nothing was measured.
    """
    lost = [reading.lost_updates for reading in readings]
    columns = {"lost_updates": np.array(lost, "float32")}
    for part in (*_PARTS, "weight", "attention_logits"):
        columns |= _columns(readings, part, limits)
    table = np.stack([columns[name] for name in PROBED], axis=1)
    return table.astype("float32")


def _columns(readings, part, limits):
    """Returns the columns of one part by name, if `PROBED` has them."""
    names = {f"{part}_{measure}": measure for measure in _MEASURES}
    columns = {n: np.full(len(readings), np.nan) for n in names if n in PROBED}
    held = [part in reading.parts for reading in readings]
    if any(held):
        found = Statistics.stacked(
            [r.parts[part] for r in readings if part in r.parts]
        )
        for name, column in columns.items():
            column[held] = _MEASURES[names[name]](found, limits)
    return columns


def in_16_bits(readings: Sequence[LayerReading], dtypes: dict) -> np.ndarray:
    """Returns which of the layers compute in 16 bits, as far as known.

    Other layers may exceed the range of 16 bits.

    Args:
        readings: List of `LayerReading`.
        dtypes: Dict from layer path to compute dtype.
    """
    return np.array(
        [_dtype(r.path, dtypes) in (*SIXTEEN_BITS, None) for r in readings],
        bool,
    )


class ZeroGradients:
    """Layers in 16 bits all of whose weights' gradients stay exactly zero.

    They may have vanished, or be zero in float32 as well.
    """

    def __init__(self):
        self._steps = {}

    def add(
        self, step: int, paths: Sequence, table: np.ndarray, narrow: np.ndarray
    ):
        """Adds a reading.

        Args:
            step: Int. Rises from reading to reading.
            paths: List of strings, one for each row.
            table: Array, as `metrics_table` returns it.
            narrow: Boolean array, which rows are about layers in 16 bits.
        """
        shares = np.where(narrow, table[:, _WEIGHT_GRADIENT_ZERO], 0.0)
        for path, share in zip(paths, shares, strict=True):
            if share == 1:
                self._steps.setdefault(path, []).append(step)
            elif share < 1:  # The share is NaN if the layer has no weights.
                self._steps.pop(path, None)

    def lasting(self) -> dict[str, list]:
        """Returns the steps of such readings of each layer, if they suffice.

        It takes at least 3 in a row up to the last reading, over 30 steps.
        """
        return {
            path: steps
            for path, steps in self._steps.items()
            if len(steps) >= _ZERO_READINGS
            and steps[-1] - steps[0] >= _ZERO_STEPS
        }


def curves(table: np.ndarray, narrow: np.ndarray) -> dict[str, float]:
    """Returns the worst layer's numbers, by name.

    Args:
        table: Array, as `metrics_table` returns it.
        narrow: Boolean array, which of its rows are about layers in 16 bits.

    Returns:
        Dict with the smallest headroom, the largest share of subnormal
        gradients and of lost updates, the largest logit, and how many layers
        had non-finite numbers. A number that no layer has is left out.
    """
    column = dict(zip(PROBED, table.T, strict=True))
    own = {name: column[name][narrow] for name in PROBED}
    for name in ("lost_updates", "attention_logits_largest"):
        own[name] = column[name]  # These two matter in any dtype.
    found = {}
    for name in _WORST:
        values = own[name][np.isfinite(own[name])]
        if values.size:
            pick = np.min if PROBED[name] == "min" else np.max
            found[name] = float(pick(values))
    bad = [column[f"{part}_nonfinite"] > 0 for part in _PARTS]
    return found | {"nonfinite_layers": float(np.any(bad, axis=0).sum())}


def _dtype(path, dtypes):
    # The path of a second call ends with "#1".
    return dtypes.get(path) or dtypes.get(path.rpartition("#")[0])
