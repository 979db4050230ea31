"""Epsilons of an optimizer that underflow in the dtype of a variable."""

import ml_dtypes
import numpy as np

_NUMPY = {"float16": "float16", "bfloat16": ml_dtypes.bfloat16}


def vanishing_epsilons(optimizer, variables) -> dict:
    """Returns the epsilons of an optimizer that are 0 in a variable's dtype.

    Keras computes the update of a variable in the variable's own dtype. There
    0 / (sqrt(0) + epsilon) is NaN, out of gradients that are all finite.

    Args:
        optimizer: `keras.optimizers.Optimizer`, or a wrapper of one.
        variables: List of the variables that it updates.

    Returns:
        Dict from the name of the argument to its value.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    dtypes = {getattr(v.dtype, "name", v.dtype) for v in variables}
    narrow = [np.dtype(_NUMPY[d]) for d in dtypes if d in _NUMPY]
    return {
        name: value
        for name, value in vars(inner).items()
        if name.startswith("epsilon") and isinstance(value, float) and value > 0
        if any(np.array(value).astype(dtype) == 0 for dtype in narrow)
    }


def check_epsilons(optimizer, variables):
    """Raises if finite gradients would make weights NaN.

    Args:
        optimizer: `keras.optimizers.Optimizer`.
        variables: List of the variables that it updates.

    Raises:
        ValueError: If an epsilon is 0 in the dtype of a variable.
    """
    for name, value in vanishing_epsilons(optimizer, variables).items():
        raise ValueError(
            f"`{name}` of {type(optimizer).__name__} underflows to 0 in "
            "float16 variables, where 0 / 0 would make weights NaN out of "
            f"finite gradients: set `{name}=1e-4`, or keep variables in "
            "float32 with the policy 'mixed_float16'. "
            f"Received: {name}={value!r}"
        )
