"""What happens inside of a layer, operation by operation."""

import numpy as np

from keras_mixprec.backend import replay as backend_replay
from keras_mixprec.numerics.arrays import (
    is_float,
    largest_magnitude,
    to_array,
)


def largest_intermediate(function, tensors) -> float:
    """Returns the largest finite magnitude that any operation produces.

    Args:
        function: Function of a list of tensors.
        tensors: The list.
    """
    largest = 0.0

    def look(inputs, outputs):
        nonlocal largest
        for array in _float_arrays(outputs):
            largest = max(largest, largest_magnitude(array))

    backend_replay.current().each_operation(function, tensors, look)
    return largest


def nonfinite_places(function, tensors) -> set:
    """Returns where operations make non-finite numbers, an item for each.

    Args:
        function: Function of a list of tensors.
        tensors: The list, finite.
    """
    places = set()

    def look(inputs, outputs):
        for output in _float_arrays(outputs):
            bad = ~np.isfinite(output)
            if bad.any():
                places.add(_place(bad))

    backend_replay.current().each_operation(function, tensors, look)
    return places


def starts_from_zero(function, tensors, known=frozenset()) -> bool:
    """Whether the first non-finite number comes from an operand of zero.

    As in 0 / 0, 1 / sqrt(0) and log(0), where something has underflowed,
    against a sum or product that overflowed.

    Args:
        function: Function of a list of tensors.
        tensors: The list, finite.
        known: Set of `nonfinite_places` in float32, which do no harm: `where`
            or a mask discards them. Defaults to none.
    """
    found = None

    def look(inputs, outputs):
        nonlocal found
        if found is not None:
            return
        arrays = _float_arrays(inputs)
        for output in _float_arrays(outputs):
            bad = ~np.isfinite(output)
            if bad.any() and _place(bad) not in known:
                found = _all_zero_where(bad, arrays)

    backend_replay.current().each_operation(function, tensors, look)
    return bool(found)


def _place(bad):
    return bad.shape, np.packbits(bad).tobytes()


def _all_zero_where(bad, operands):
    """Whether wherever a result is bad some operand is zero, and all finite."""
    zero = np.zeros(bad.shape, bool)
    for operand in operands:
        try:
            operand = np.broadcast_to(operand, bad.shape)
        except ValueError:
            return False  # No elementwise operation.
        if not np.isfinite(operand[bad]).all():
            return False
        zero |= operand == 0
    return bool(zero[bad].all())


def _float_arrays(tensors):
    return [to_array(x) for x in tensors if is_float(x)]
