"""What the optimizer's constructor takes."""

import warnings

import keras

from keras_mixprec._checks import check_choice
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


def resolve_rule(loss_scale, initial_scale, growth_steps, dynamic) -> LossScale:
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
        if isinstance(loss_scale, LossScale):
            return loss_scale
        schedule = keras.optimizers.schedules.LearningRateSchedule
        if isinstance(loss_scale, (dict, schedule)):
            return ScheduledLossScale(loss_scale)
        return FixedLossScale(check_scale("loss_scale", loss_scale))
    if loss_scale != "dynamic":
        raise ValueError(
            "`loss_scale` must be 'dynamic', a number, a schedule, or a "
            "rule such as `DynamicLossScale.preset('torch')`. "
            f"Received: loss_scale={loss_scale!r}"
        )
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
