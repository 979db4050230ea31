"""What the ranges measured in a step say of each layer, in numbers."""

from collections.abc import Sequence

import numpy as np

from keras_mixprec.formats import SIXTEEN_BITS, Format, get_format
from keras_mixprec.numerics.probe import LayerReading
from keras_mixprec.numerics.statistics import Statistics

# The names end the names of the columns.
_MEASURES = {
    "headroom_bits": lambda s, limits: s.headroom_bits(limits),
    "nonfinite": lambda s, limits: s.nonfinite,
    "zero": lambda s, limits: s.zero,
    "subnormal": lambda s, limits: s.subnormal(limits),
    "below": lambda s, limits: s.below(limits),
}
_PARTS = ("activation", "gradient", "weight_gradient")

# The columns of `heat`, and whether a small or a large number is the worse.
METRICS = {
    name: "min" if name.endswith("headroom_bits") else "max"
    for name in (
        *(f"{part}_{measure}" for part in _PARTS for measure in _MEASURES),
        "weight_headroom_bits",
        "lost_updates",
    )
}


def heat(readings: Sequence[LayerReading], limits: Format) -> np.ndarray:
    """Returns the numbers of a probed step, a row for each layer call.

    Args:
        readings: List of `LayerReading`.
        limits: `Format` that the numbers refer to.

    Returns:
        Float32 array `(len(readings), len(METRICS))`: headroom in bits,
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
        told = [measure(found, limits) for measure in measures]
        columns[held] = np.stack(told, axis=1)
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
        numbers; without what no layer told.
    """
    column = dict(zip(METRICS, table.T, strict=True))
    own = {name: column[name][narrow] for name in METRICS}
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
