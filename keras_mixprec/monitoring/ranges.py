"""Computes headroom, zeros and subnormals of each layer from a reading."""

from collections.abc import Sequence

import numpy as np

from keras_mixprec.formats import SIXTEEN_BITS, Format
from keras_mixprec.metrics import PROBED
from keras_mixprec.numerics.range_reading import LayerReading
from keras_mixprec.numerics.statistics import Statistics

# The measures of a tensor. A column name in `PROBED` is a part of a layer plus
# a measure, such as `gradient_subnormal`.
_MEASURES = {
    "headroom_bits": lambda s, limits: s.headroom_bits(limits),
    "nonfinite": lambda s, limits: s.nonfinite,
    "zero": lambda s, limits: s.zero,
    "subnormal": lambda s, limits: s.subnormal(limits),
    "below": lambda s, limits: s.below(limits),
    "largest": lambda s, limits: np.where(s.nonfinite, np.inf, s.largest),
}
_PARTS = ("activation", "gradient", "weight_gradient")
# TensorBoard shows a curve for each of these columns, with the value of the
# worst layer.
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

# Weight gradients that are zero in 3 readings over 30 steps are worth a
# diagnosis. Zero gradients over fewer steps prove nothing: a gate that starts
# at zero blocks gradients too, but moves before step 30.
_ZERO_READINGS = 3
_ZERO_STEPS = 30


def metrics_table(
    readings: Sequence[LayerReading], limits: Format
) -> np.ndarray:
    """Returns the numbers of a reading, with a row for each layer call.

    Args:
        readings: List of `LayerReading`.
        limits: The `Format` whose range counts.

    Returns:
        Float32 array of shape `(len(readings), len(PROBED))`. The columns are
        headroom in bits, the number of non-finite elements, the shares of
        elements that are zero, subnormal or too small for the format, and the
        largest magnitude. NaN stands for a missing measurement.
    """
    lost = [reading.lost_updates for reading in readings]
    columns = {"lost_updates": np.array(lost, "float32")}
    for part in (*_PARTS, "weight", "attention_logits"):
        columns |= _columns(readings, part, limits)
    table = np.stack([columns[name] for name in PROBED], axis=1)
    return table.astype("float32")


def _columns(readings, part, limits):
    """Returns the columns of one part that `PROBED` has, by name."""
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
    """Returns a mask of the layers that compute in 16 bits.

    A layer with an unknown dtype counts as a 16-bit layer.

    Args:
        readings: List of `LayerReading`.
        dtypes: Dict from layer path to compute dtype.
    """
    return np.array(
        [_dtype(r.path, dtypes) in (*SIXTEEN_BITS, None) for r in readings],
        bool,
    )


class ZeroGradients:
    """Finds 16-bit layers whose weight gradients stay exactly zero.

    Such gradients may have underflowed, or may be zero in float32 too.
    """

    def __init__(self):
        self._steps = {}

    def add(
        self, step: int, paths: Sequence, table: np.ndarray, narrow: np.ndarray
    ):
        """Adds a reading.

        Args:
            step: Int. Larger than in the previous reading.
            paths: List of strings, one for each row.
            table: Array, as `metrics_table` returns it.
            narrow: Boolean array, true for the rows of 16-bit layers.
        """
        shares = np.where(narrow, table[:, _WEIGHT_GRADIENT_ZERO], 0.0)
        for path, share in zip(paths, shares, strict=True):
            if share == 1:
                self._steps.setdefault(path, []).append(step)
            elif share < 1:  # NaN stands for a layer without weights.
                self._steps.pop(path, None)

    def lasting(self) -> dict[str, list]:
        """Returns the layers whose gradients have been zero for long.

        Returns:
            Dict from layer path to the steps of the readings with zero
            gradients. Each layer has at least 3 of these readings in a row,
            over at least 30 steps.
        """
        return {
            path: steps
            for path, steps in self._steps.items()
            if len(steps) >= _ZERO_READINGS
            and steps[-1] - steps[0] >= _ZERO_STEPS
        }


def curves(table: np.ndarray, narrow: np.ndarray) -> dict[str, float]:
    """Returns the numbers of the worst layer, by name.

    Args:
        table: Array, as `metrics_table` returns it.
        narrow: Boolean array, true for the rows of 16-bit layers.

    Returns:
        Dict with the smallest headroom, the largest shares of subnormal
        gradients and lost updates, the largest logit, and the number of layers
        with non-finite numbers. Numbers without any measurement are left out.
    """
    column = dict(zip(PROBED, table.T, strict=True))
    own = {name: column[name][narrow] for name in PROBED}
    # Lost updates and large attention logits matter in any dtype.
    for name in ("lost_updates", "attention_logits_largest"):
        own[name] = column[name]
    found = {}
    for name in _WORST:
        values = own[name][np.isfinite(own[name])]
        if values.size:
            pick = np.min if PROBED[name] == "min" else np.max
            found[name] = float(pick(values))
    bad = [column[f"{part}_nonfinite"] > 0 for part in _PARTS]
    return found | {"nonfinite_layers": float(np.any(bad, axis=0).sum())}


def _dtype(path, dtypes):
    # If a model calls a layer twice, the path of the second call ends with
    # "#1".
    return dtypes.get(path) or dtypes.get(path.rpartition("#")[0])
