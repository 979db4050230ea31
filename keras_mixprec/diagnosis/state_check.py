"""Finds moving averages and counters that 16-bit rounding stops.

A moving average stops when its change is less than half of its last 16-bit
digit. A counter stops when the next 16-bit number is more than 1 away.
"""

import ml_dtypes
import numpy as np

from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.criterion import norm, relative_error
from keras_mixprec.diagnosis.culprit import Culprit
from keras_mixprec.formats import SIXTEEN_BITS, get_format
from keras_mixprec.keras_internals import own_non_trainable, set_value
from keras_mixprec.numerics.arrays import restoring, to_array
from keras_mixprec.numerics.dry_step import DryStep, exact_step
from keras_mixprec.numerics.layer_hooks import with_sublayers
from keras_mixprec.policies.layers import walk_with_model


def layers_that_stand_still(
    model, data, exact: DryStep, step: DryStep
) -> list[Culprit]:
    """Returns the layers whose variables stop changing in 16 bits, or will.

    Args:
        model: A built and compiled `keras.Model`.
        data: The batch, as `train_step` takes it.
        exact: `DryStep` of the batch in float32, at loss scale 1.
        step: `DryStep` of the batch in 16 bits.
    """
    owned = [
        (entry, variable)
        for entry in walk_with_model(model)
        for variable in own_non_trainable(entry.layer)
        if _is_rounded(variable, exact, step)
    ]
    if not owned:
        return []
    with restoring([variable for _, variable in owned]):
        for _, variable in owned:
            set_value(variable, exact.state[id(variable)])
        second = exact_step(model, data, records=False)
    found = {}
    for entry, variable in owned:
        error = _lost_change(entry.layer, variable, step, exact, second)
        if error is None:
            continue
        known = found.get(entry.path)
        numbers = known.numbers if known else {"error_of_change": 0.0}
        numbers["error_of_change"] = max(error, numbers["error_of_change"])
        if id(variable) not in step.state:
            numbers["not_written"] = variable.path
        layers = with_sublayers(entry.layer)
        fault = "precision_loss", "update", numbers
        found[entry.path] = Culprit(entry.path, layers, *fault)
    return [*found.values()]


def _after(step, variable):
    """Returns a variable's value after a step, even if it is not set."""
    return to_array(step.state.get(id(variable), variable.value))


def _is_rounded(variable, exact, step):
    """Returns whether a step rounds a variable to 16 bits, or does not set it.

    On torch, a float16 layer assigns to the cast copy of a variable, so the new
    value is lost.
    """
    # If the variable itself has 16 bits, a wider compute dtype does not help.
    if "float" not in variable.dtype or variable.dtype in SIXTEEN_BITS:
        return False
    now, low = to_array(variable.value), _after(step, variable)
    changes = (_after(exact, variable) != now).any() and np.isfinite(low).all()
    return changes and (_is_16_bit(low) or (low == now).all())


def _is_16_bit(array):
    with np.errstate(over="ignore"):
        dtypes = ("float16", ml_dtypes.bfloat16)
        return any((array == array.astype(d)).all() for d in dtypes)


def _lost_change(layer, variable, step, exact, second):
    """Returns the error of a variable's change if 16 bits lose the change.

    A moving average covers the same share of the remaining way at each step.
    Two steps in float32 show this share, and so the value that it approaches.
    """
    now, first = to_array(variable.value), _after(exact, variable)
    change = first - now
    error = relative_error([_after(step, variable) - now], [change])
    is_lost = error > thresholds.LOST_CHANGE
    after = second.state.get(id(variable), first)
    next_change = to_array(after) - first
    same = float((change * next_change).sum(dtype="float64"))
    share = 1 - same / norm(change) ** 2
    if share >= thresholds.SETTLING_SHARE:
        limit = now + change / share
        is_lost &= norm(limit - now) > thresholds.SETTLED_STATE * norm(limit)
        # In 16 bits, a moving average stops when its change per step is half of
        # its last digit.
        epsilon = get_format(layer.compute_dtype).epsilon
        digit = epsilon * 2.0 ** (np.frexp(limit)[1] - 2.0)
        half = np.where(limit, digit, 0.0)
        is_lost |= norm(half) > share * thresholds.FORWARD_ERROR * norm(limit)
    return error if is_lost else None
