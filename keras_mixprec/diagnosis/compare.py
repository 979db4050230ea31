"""How far a 16-bit result is from float32's, and whether that matters."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from keras_mixprec.diagnosis import thresholds
from keras_mixprec.keras_internals import part_for
from keras_mixprec.numerics.arrays import (
    count_nonfinite,
    largest_magnitude,
    to_array,
)
from keras_mixprec.numerics.forward_pass import ForwardPass

# Between these a sum of squares loses nothing that counts in float32.
_SQUARES = 1e-20, 1e30


def relative_error(
    low: Sequence[np.ndarray], exact: Sequence[np.ndarray]
) -> float:
    """Returns `|low - exact| / |exact|` over all arrays together.

    Args:
        low: Arrays, what 16 bits gave.
        exact: Arrays of the same shapes, what float32 gave.

    Returns:
        Float >= 0; infinite if `low` has a non-finite element where `exact`
        has none. Elements where float32 is not finite do not count.
    """
    off, size = 0.0, 0.0
    for narrow, wide in zip(low, exact, strict=True):
        with np.errstate(all="ignore"):
            norms = norm(narrow - wide), norm(wide)
        if not math.isfinite(norms[0]):
            usable = np.isfinite(wide)
            narrow, wide = (a[usable].astype("float64") for a in (narrow, wide))
            if not np.isfinite(narrow).all():
                return math.inf
            norms = norm(narrow - wide), norm(wide)
        off, size = math.hypot(off, norms[0]), math.hypot(size, norms[1])
    if size == 0.0:
        return math.inf if off else 0.0
    return off / size


def output_error(
    low: Sequence[np.ndarray], exact: Sequence[np.ndarray]
) -> float:
    """Returns how far the output of a model is off that is the farthest.

    One that stands for minus infinity may be that in 16 bits, as in scores
    of what is masked.

    Args:
        low: Arrays, what 16 bits gave.
        exact: Arrays, what float32 gave.

    Returns:
        Float >= 0, as `relative_error`. Outputs whose shapes are others, as of
        boxes that are chosen, count only if they are not finite.
    """
    if [a.shape for a in low] != [a.shape for a in exact]:
        return math.inf if nonfinite(low) and not nonfinite(exact) else 0.0

    def error(narrow, wide):
        mask = np.isneginf(narrow) & (wide <= thresholds.MINUS_INFINITY)
        return relative_error([np.where(mask, wide, narrow)], [wide])

    return max(map(error, low, exact), default=0.0)


def pass_error(low: ForwardPass, exact: ForwardPass) -> float:
    """Returns how far the output is off that is the farthest.

    Once other tokens have been chosen, only what is not finite counts.

    Args:
        low: `ForwardPass` in 16 bits.
        exact: `ForwardPass` in float32.
    """
    pairs = [*zip(low.histories, exact.histories, strict=False)]
    same = [a == b for a, b in pairs]
    count = same.index(False) if False in same else len(low.outputs)
    later = [
        [np.isnan(a).any() or np.isposinf(a).any() for a in run.outputs[count:]]
        for run in (low, exact)
    ]
    if any(later[0]) and not any(later[1]):
        return math.inf
    return output_error(low.outputs[:count], exact.outputs[:count])


def largest(arrays: Sequence[np.ndarray]) -> float:
    """Returns the largest finite magnitude, or 0."""
    return max(map(largest_magnitude, arrays), default=0.0)


def nonfinite(arrays: Sequence[np.ndarray]) -> int:
    """Returns the number of elements that are infinite or NaN."""
    return sum(map(count_nonfinite, arrays))


def norm(values: np.ndarray) -> float:
    """Returns the norm of all numbers of an array together."""
    # Summed in pairs, so that float32 is precise enough. Not `np.linalg.norm`,
    # whose threads wait for each other on a busy machine: 5 ms a call.
    squares = float(np.square(values).sum())
    if not _SQUARES[0] < squares < _SQUARES[1]:
        squares = float(np.square(values, dtype="float64").sum())
    return math.sqrt(squares)


def effective_update(model) -> Callable:
    """Returns a function that says if a gradient would move its variable.

    In float32, by the model's optimizer; it takes the variable and the
    gradient as an array.

    Args:
        model: A compiled `keras.Model`.
    """
    optimizer = model.optimizer
    inner = getattr(optimizer, "inner_optimizer", optimizer)

    def effective(variable, gradient):
        own = part_for(inner, variable)
        epsilon = getattr(own, "epsilon", None)
        size = largest_magnitude(gradient)
        if isinstance(epsilon, float):
            return size >= thresholds.SHARE_OF_EPSILON * epsilon
        weight = largest_magnitude(to_array(variable.value))
        rate = 1.0 if own is None else float(to_array(own.learning_rate))
        return rate * size >= thresholds.SHARE_OF_WEIGHT * weight

    return effective
