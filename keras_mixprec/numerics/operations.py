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
        places.update(map(_place, _nonfinite(_float_arrays(outputs))))

    backend_replay.current().each_operation(function, tensors, look)
    return places


def starts_from_zero(function, tensors, known=frozenset()) -> bool:
    """Whether the non-finite numbers that remain come from an operand of zero.

    As in 0 / 0, 1 / sqrt(0) and log(0), where something has underflowed,
    against a sum or product that overflowed. An infinity that a later operation
    makes finite again, as exp(-inf), is not the origin of what remains.

    Args:
        function: Function of a list of tensors.
        tensors: The list, finite.
        known: Set of `nonfinite_places` in float32, which do no harm: `where`
            or a mask discards them. Defaults to none.
    """
    origins: dict = {}  # Of every place with non-finite numbers, in order.
    last = False

    def look(inputs, outputs):
        nonlocal last
        arrays = _float_arrays(inputs)
        before = {_place(bad) for bad in _nonfinite(arrays)}
        inherited = [origins[place] for place in origins if place in before]
        for bad in _nonfinite(_float_arrays(outputs)):
            place = _place(bad)
            if place not in known:
                last = (inherited or [_all_zero_where(bad, arrays)])[0]
                origins[place] = last

    backend_replay.current().each_operation(function, tensors, look)
    return last


def _nonfinite(arrays):
    """Returns a mask of each array that has non-finite numbers."""
    masks = [~np.isfinite(array) for array in arrays]
    return [bad for bad in masks if bad.any()]


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
