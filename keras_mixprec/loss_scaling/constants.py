"""Constants of an optimizer that are lost in 16-bit variables."""

import keras
import ml_dtypes
import numpy as np

from keras_mixprec.keras_internals import innermost, parts_of

_NUMPY = {"float16": "float16", "bfloat16": ml_dtypes.bfloat16}


# Optimizers that multiply or divide their steps by `1 - beta_2**step`. Older
# versions of Keras lack some of them.
_CORRECTED = tuple(
    vars(keras.optimizers)[name]
    for name in ("Adam", "Lamb", "Muon", "Nadam", "ScheduleFreeAdamW")
    if name in vars(keras.optimizers)
)


def lost_constants(optimizer, variables) -> dict:
    """Returns the arguments of an optimizer that a variable's dtype lacks.

    Keras computes the update of a variable in the variable's own dtype. If the
    epsilon underflows there, 0 / (sqrt(0) + epsilon) is NaN although all
    gradients are finite. If `beta_2` rounds to 1, the bias correction is 0:
    Adam moves no weight then, and other optimizers make weights NaN.

    Args:
        optimizer: `keras.optimizers.Optimizer`, or a wrapper of one.
        variables: List of the variables that it updates.

    Returns:
        Dict from the name of the argument to its value.
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
    """Returns what a lost constant becomes, and a value that is not lost."""
    return ("1", "0.99") if name == "beta_2" else ("0", "1e-4")


def _is_lost(inner, name, value, dtype):
    if name == "beta_2":
        rounded = np.array(value).astype(dtype)
        return isinstance(inner, _CORRECTED) and rounded == 1 > value
    if not name.startswith("epsilon") or value <= 0:
        return False
    # Adagrad adds it to sums that do not start at 0.
    if getattr(inner, "initial_accumulator_value", 0) > 0:
        return False
    if isinstance(inner, keras.optimizers.Adamax):
        value *= 1 - inner.beta_1  # The first step multiplies it by this.
    return np.array(value).astype(dtype) == 0


def check_constants(optimizer, variables):
    """Raises if finite gradients would make weights NaN, or move none.

    Args:
        optimizer: `keras.optimizers.Optimizer`.
        variables: List of the variables that it updates.

    Raises:
        ValueError: If an argument is not itself in the dtype of a variable.
    """
    for name, value in lost_constants(optimizer, variables).items():
        becomes, repaired = becomes_instead(name)
        raise ValueError(
            f"`{name}` of {type(optimizer).__name__} rounds to {becomes} in "
            "16-bit variables, where no weight would move or all become NaN: "
            f"set `{name}={repaired}`, or keep variables in float32 with a "
            f"mixed policy. Received: {name}={value!r}"
        )
