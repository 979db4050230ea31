"""A skipped step changes no variable, and a good step the right ones.

Every optimizer that Keras has enrols itself.
"""

import keras
import numpy as np
from keras import optimizers
from optimizer_models import (
    BACKEND,
    assert_identical,
    make_apply,
    make_variables,
    numbers,
    over_modes,
)

from keras_mixprec import LossScaleOptimizer

SHAPES = (3, 4), (4,)
EVERYTHING = {
    "weight_decay": 0.1,
    "clipnorm": 0.7,
    "use_ema": True,
    "ema_momentum": 0.8,
    "ema_overwrite_frequency": 2,
}
ACCUMULATING = {"gradient_accumulation_steps": 2, "weight_decay": 0.1}


class AssignsDirectly(optimizers.Optimizer):
    """A user's optimizer that goes past `self.assign`."""

    def build(self, variables):
        super().build(variables)
        self.sums = self.add_optimizer_variables(variables, "sum")

    def update_step(self, gradient, variable, learning_rate):
        total = self.sums[self._get_variable_index(variable)]
        total.assign(total + gradient)
        variable.assign(variable - total * learning_rate)


def multi(**arguments):
    sgd = optimizers.SGD(momentum=0.9, **arguments)
    parts = optimizers.OptimizerMap(optimizers.Adam(**arguments), {"v0": sgd})
    return optimizers.MultiOptimizer(parts)


def adam_on_schedule(**arguments):
    schedule = optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    return optimizers.Adam(schedule, **arguments)


CLASSES = {
    name: kind
    for name, kind in vars(optimizers).items()
    if isinstance(kind, type) and issubclass(kind, optimizers.Optimizer)
}
del CLASSES["Optimizer"], CLASSES["LossScaleOptimizer"]
if hasattr(optimizers, "MultiOptimizer"):  # From Keras 3.14 on.
    CLASSES["MultiOptimizer"] = multi
CASES = {name: (kind, EVERYTHING) for name, kind in CLASSES.items()}
CASES |= {
    "user's": (AssignsDirectly, EVERYTHING | {"learning_rate": 0.1}),
    "on a schedule": (adam_on_schedule, EVERYTHING),
    "momentum": (optimizers.SGD, EVERYTHING | {"momentum": 0.9}),
    "accumulating": (optimizers.Adam, ACCUMULATING),
}
if "MultiOptimizer" in CLASSES:
    CASES["several, accumulating"] = (multi, ACCUMULATING)


def good(seed):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=s).astype("float32") for s in SHAPES]


def all_variables(inner):
    """Returns its variables, and those that it does not list (Nadam)."""
    others = [v for v in vars(inner).values() if isinstance(v, keras.Variable)]
    return inner.variables + others


@over_modes("make,arguments", CASES, quick=9)
def test_bad_steps_change_nothing_and_good_ones_all(make, arguments, mode):
    """Runs it bare and wrapped, the wrapped one with bad steps between."""
    if BACKEND == "jax":
        # Compiled, a step of an optimizer takes as long as its variables.
        mode = "eager" if arguments == ACCUMULATING else "jit"
    plain, ours = make_variables(*SHAPES), make_variables(*SHAPES)
    for variables in (plain, ours):
        variables[1].constraint = keras.constraints.MaxNorm(1.5, axis=0)
    optimizer = LossScaleOptimizer(make(**arguments))
    apply = make_apply(optimizer, ours, mode)
    reference = make_apply(make(**arguments), plain, "eager")
    watched = ours + all_variables(optimizer.inner_optimizer)
    for seed in range(3):
        reference(good(seed))
        scale = np.float32(float(optimizer.loss_scale))
        apply([g * scale for g in good(seed)])
        before, bad = numbers(watched), good(seed)
        bad[seed % 2].flat[-1] = (np.inf, np.nan, -np.inf)[seed]
        apply(bad)
        assert_identical(numbers(watched), before)
    assert optimizer.skipped_steps == 3
    for a, b in zip(numbers(ours), numbers(plain), strict=True):
        # A compiler may fuse, and so round, in another order.
        close = {"rtol": 1e-5, "atol": 1e-6} if mode != "eager" else {"rtol": 0}
        np.testing.assert_allclose(a, b, **close)
        assert not np.array_equal(a, np.ones_like(a))
