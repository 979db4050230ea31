"""Which gradients are large enough to matter."""

from collections.abc import Callable

from keras_mixprec.diagnosis import thresholds
from keras_mixprec.numerics.arrays import largest_magnitude, to_array


def mover(model) -> Callable:
    """Returns a function that says if a gradient would move its variable.

    In float32, by the model's optimizer; it takes the variable and the
    gradient as an array.

    Args:
        model: A compiled `keras.Model`.
    """
    optimizer = model.optimizer
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    epsilon = getattr(inner, "epsilon", None)

    def moves(variable, gradient):
        size = largest_magnitude(gradient)
        if isinstance(epsilon, float):
            return size >= thresholds.SHARE_OF_EPSILON * epsilon
        weight = largest_magnitude(to_array(variable.value))
        rate = float(inner.learning_rate) if inner is not None else 1.0
        return rate * size >= thresholds.SHARE_OF_WEIGHT * weight

    return moves
