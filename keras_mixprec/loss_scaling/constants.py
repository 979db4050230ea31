"""Finds optimizer constants that 16-bit variables round away."""

import keras
import ml_dtypes
import numpy as np

from keras_mixprec.keras_internals import innermost, parts_of

_NUMPY = {"float16": "float16", "bfloat16": ml_dtypes.bfloat16}


# Optimizers with a bias correction of `1 - beta_2**step`. Older versions of
# Keras lack some of these optimizers.
_CORRECTED = tuple(
    vars(keras.optimizers)[name]
    for name in ("Adam", "Lamb", "Muon", "Nadam", "ScheduleFreeAdamW")
    if name in vars(keras.optimizers)
)


def lost_constants(optimizer, variables) -> dict:
    """Returns the optimizer arguments that a variable's dtype rounds away.

    Keras computes the update of a variable in the variable's own dtype. If
    epsilon underflows in that dtype, 0 / (sqrt(0) + epsilon) is NaN even for
    finite gradients. If `beta_2` rounds to 1, the bias correction is 0. Then
    Adam does not change any weight, and other optimizers make weights NaN.

    Args:
        optimizer: `keras.optimizers.Optimizer`, or a wrapper around one.
        variables: List of the variables that the optimizer updates.

    Returns:
        Dict from argument names to values.
    """
    dtypes = {getattr(v.dtype, "name", v.dtype) for v in variables}
    narrow = [np.dtype(_NUMPY[d]) for d in dtypes if d in _NUMPY]
    return {
        name: value
        for part in parts_of(innermost(optimizer))
        for name, value in vars(part).items()
        if isinstance(value, float)
        if any(_is_lost(part, name, value, dtype) for dtype in narrow)
    }


def becomes_instead(name: str) -> tuple[str, str]:
    """Returns the rounded value of a lost constant, and a safe value."""
    return ("1", "0.99") if name == "beta_2" else ("0", "1e-4")


def _is_lost(inner, name, value, dtype):
    if name == "beta_2":
        rounded = np.array(value).astype(dtype)
        return isinstance(inner, _CORRECTED) and rounded == 1 > value
    if not name.startswith("epsilon") or value <= 0:
        return False
    # Adagrad's accumulators do not start at 0, so an epsilon of 0 is harmless.
    if getattr(inner, "initial_accumulator_value", 0) > 0:
        return False
    if isinstance(inner, keras.optimizers.Adamax):
        # In its first step, Adamax multiplies epsilon by `1 - beta_1`, and the
        # product must not underflow.
        value *= 1 - inner.beta_1
    return np.array(value).astype(dtype) == 0


def check_constants(optimizer, variables):
    """Raises if the variables' dtype rounds an optimizer constant away.

    Args:
        optimizer: `keras.optimizers.Optimizer`.
        variables: List of the variables that the optimizer updates.

    Raises:
        ValueError: If the dtype of a variable rounds an argument to 0 or 1.
    """
    for name, value in lost_constants(optimizer, variables).items():
        becomes, repaired = becomes_instead(name)
        raise ValueError(
            f"`{name}` of {type(optimizer).__name__} rounds to {becomes} in "
            "16-bit variables, so weights would become NaN or never change. "
            f"Set `{name}={repaired}`, or keep variables in float32 with a "
            f"mixed policy. Received: {name}={value!r}"
        )
