"""What the optimizer's constructor takes, and hands to the inner optimizer."""

import warnings

import keras
import ml_dtypes
import numpy as np

from keras_mixprec._checks import check_choice
from keras_mixprec.keras_internals import track_variable
from keras_mixprec.loss_scaling.dynamic import DynamicLossScale
from keras_mixprec.loss_scaling.rules import (
    FixedLossScale,
    LossScale,
    ScheduledLossScale,
    check_scale,
)


def check_inner(inner):
    """Returns the inner optimizer, or raises saying what is wrong."""
    if isinstance(inner, (str, dict)):
        inner = keras.optimizers.get(inner)
    if isinstance(inner, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "`inner_optimizer` scales the loss already; wrap the optimizer "
            f"inside it instead. Received: inner_optimizer={inner}"
        )
    if not isinstance(inner, keras.optimizers.Optimizer):
        raise TypeError(
            "`inner_optimizer` must be a `keras.optimizers.Optimizer` or the "
            f"name of one. Received: inner_optimizer={inner!r} of type "
            f"{type(inner).__name__}"
        )
    if inner.loss_scale_factor is not None:
        # Keras' own class drops it without a word.
        warnings.warn(
            "The `loss_scale_factor` of `inner_optimizer` is set to None, "
            "since the wrapper scales the loss; for a fixed scale pass "
            "`loss_scale` to the wrapper. Received: "
            f"loss_scale_factor={inner.loss_scale_factor!r}",
            stacklevel=3,
        )
    return inner


def check_window(discard_window, inner):
    """Raises if there is no window that an overflow could discard."""
    check_choice("discard_window", discard_window, (True, False))
    steps = inner.gradient_accumulation_steps
    if discard_window and not steps:
        raise ValueError(
            "`discard_window=True` needs an `inner_optimizer` that accumulates "
            "gradients: set its `gradient_accumulation_steps`. Received: "
            f"gradient_accumulation_steps={steps!r}"
        )


def resolve_rule(loss_scale, initial_scale, growth_steps, dynamic):
    """Returns the update rule that the arguments ask for together."""
    given = {
        "initial_scale": initial_scale,
        "growth_interval": growth_steps,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if not isinstance(loss_scale, str):
        if given or not dynamic:
            raise ValueError(
                "`initial_scale`, `dynamic_growth_steps` and `dynamic` "
                "configure a dynamic loss scale and cannot be combined with "
                f"another one. Received: loss_scale={loss_scale!r}, "
                f"initial_scale={initial_scale!r}, "
                f"dynamic_growth_steps={growth_steps!r}, dynamic={dynamic!r}"
            )
        return get_rule(loss_scale)
    get_rule(loss_scale)
    if dynamic:
        return DynamicLossScale(**given)
    if list(given) != ["initial_scale"]:
        raise ValueError(
            "`dynamic=False` fixes the loss scale, so it needs "
            "`initial_scale` and no `dynamic_growth_steps`. To scale without "
            "skipping bad steps, leave the wrapper out and set "
            "`loss_scale_factor` on the optimizer. Received: "
            f"initial_scale={initial_scale!r}, "
            f"dynamic_growth_steps={growth_steps!r}"
        )
    return FixedLossScale(initial_scale)


def get_rule(loss_scale) -> LossScale:
    """Returns the rule that a `loss_scale` argument stands for.

    Args:
        loss_scale: `"dynamic"`, a number, a `LearningRateSchedule` or a rule.
    """
    if isinstance(loss_scale, LossScale):
        return loss_scale
    if isinstance(loss_scale, str):
        if loss_scale != "dynamic":
            raise ValueError(
                "`loss_scale` must be 'dynamic', a number, a schedule, or a "
                "rule such as `DynamicLossScale.preset('torch')`. "
                f"Received: loss_scale={loss_scale!r}"
            )
        return DynamicLossScale()
    schedules = keras.optimizers.schedules
    if isinstance(loss_scale, (dict, schedules.LearningRateSchedule)):
        return ScheduledLossScale(loss_scale)
    return FixedLossScale(check_scale("loss_scale", loss_scale))


_NUMPY = {"float16": "float16", "bfloat16": ml_dtypes.bfloat16}


# Those whose steps are multiplied or divided by `1 - beta_2**step`, of which
# older versions of Keras have not all.
_CORRECTED = tuple(
    vars(keras.optimizers)[name]
    for name in ("Adam", "Lamb", "Muon", "Nadam", "ScheduleFreeAdamW")
    if name in vars(keras.optimizers)
)


def lost_constants(optimizer, variables) -> dict:
    """Returns the arguments of an optimizer that a variable's dtype lacks.

    Keras computes the update of a variable in the variable's own dtype. There
    0 / (sqrt(0) + epsilon) is NaN, out of gradients that are all finite, if the
    epsilon underflows; and if `beta_2` rounds to 1, so does what corrects the
    bias: Adam moves no weight then, others make them NaN.

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
        for part in getattr(inner, "optimizers", [inner])
        for name, value in vars(part).items()
        if isinstance(value, float)
        if any(_is_lost(part, name, value, dtype) for dtype in narrow)
    }


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
        value *= 1 - inner.beta_1  # By which the first step multiplies it.
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
        what = f"`{name}` of {type(optimizer).__name__}"
        if name == "beta_2":
            raise ValueError(
                f"{what} rounds to 1 in 16-bit variables, where no weight "
                "would move or all become NaN: set `beta_2=0.99`, or keep "
                "variables in float32 with a mixed policy. "
                f"Received: beta_2={value!r}"
            )
        raise ValueError(
            f"{what} underflows to 0 in float16 variables, where 0 / 0 would "
            "make weights NaN out of finite gradients: set "
            f"`{name}=1e-4`, or keep variables in float32 with the policy "
            f"'mixed_float16'. Received: {name}={value!r}"
        )


_ARGUMENTS = (
    "weight_decay",
    "clipnorm",
    "clipvalue",
    "global_clipnorm",
    "use_ema",
    "ema_momentum",
    "ema_overwrite_frequency",
    "gradient_accumulation_steps",
)


def _delegated(name):
    def get(self):
        inner = vars(self).get("inner_optimizer")
        return getattr(inner, name, None)

    def set_(self, value):
        # Keras' constructor sets its defaults before there is an inner one.
        if "inner_optimizer" in vars(self):
            setattr(self.inner_optimizer, name, value)

    return property(get, set_, doc=f"`{name}` of the inner optimizer.")


def build_inner(inner: keras.optimizers.Optimizer, variables: list) -> None:
    """Builds an inner optimizer, with all that it has for variables.

    Args:
        inner: The optimizer.
        variables: List of variables.
    """
    if not inner.built:
        inner.build(variables)
    # Those that Keras tracks as they are set (Nadam's product), which it leaves
    # out while a wrapper is being built: a jitted step on JAX would lose them.
    for variable in list(vars(inner).values()):
        known = any(variable is v for v in inner.variables)
        if isinstance(variable, keras.Variable) and not known:
            track_variable(inner, variable)


class DelegatesToInner:
    """Mixin: attributes that the wrapper lacks are the inner optimizer's."""

    def exclude_from_weight_decay(self, var_list=None, var_names=None):
        """Excludes variables from the inner optimizer's weight decay."""
        self.inner_optimizer.exclude_from_weight_decay(var_list, var_names)

    def __getattr__(self, name):
        # Called only where the usual look-up failed.
        if name.startswith("_") or "inner_optimizer" not in vars(self):
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}"
            )
        return getattr(self.inner_optimizer, name)

    def __setattr__(self, name, value):
        inner = vars(self).get("inner_optimizer")
        if (
            inner is not None
            and not name.startswith("_")
            and name not in vars(self)
            and not hasattr(type(self), name)
            and hasattr(inner, name)
        ):
            setattr(inner, name, value)
        else:
            super().__setattr__(name, value)


for _name in _ARGUMENTS:
    setattr(DelegatesToInner, _name, _delegated(_name))
