"""A skipped step changes no variable at all, a good one what it should.

Every optimizer that Keras has enrols itself, in every mode of the backend.
"""

import keras
import numpy as np
import pytest
from keras import optimizers
from optimizer_models import (
    BACKEND,
    MODES,
    assert_identical,
    make_apply,
    make_variables,
    numbers,
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
    return optimizers.MultiOptimizer(
        optimizers.OptimizerMap(
            optimizers.Adam(**arguments),
            {"v0": optimizers.SGD(momentum=0.9, **arguments)},
        )
    )


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
CLASSES |= {
    "user's": lambda **arguments: AssignsDirectly(0.1, **arguments),
    "Adam on a schedule": adam_on_schedule,
    "SGD with momentum": lambda **arguments: optimizers.SGD(
        0.1, 0.9, nesterov=True, **arguments
    ),
    "Adam with amsgrad": lambda **arguments: optimizers.Adam(
        0.1, amsgrad=True, **arguments
    ),
}


def good(seed):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=s).astype("float32") for s in SHAPES]


def bad(index, value):
    gradients = good(index)
    gradients[index].flat[-1] = value
    return gradients


def scaled(gradients, optimizer):
    scale = np.float32(float(optimizer.loss_scale))
    return [g * scale for g in gradients]


def all_variables(inner):
    """Returns its variables, and those that it does not list (Nadam)."""
    others = [v for v in vars(inner).values() if isinstance(v, keras.Variable)]
    return inner.variables + others


def compare(make, arguments, mode):
    """Runs it bare and wrapped, the wrapped one with bad steps between."""
    plain, ours = make_variables(*SHAPES), make_variables(*SHAPES)
    for variables in (plain, ours):
        variables[1].constraint = keras.constraints.MaxNorm(1.5, axis=0)
    optimizer = LossScaleOptimizer(make(**arguments))
    apply = make_apply(optimizer, ours, mode)
    reference = make_apply(make(**arguments), plain, "eager")
    watched = ours + all_variables(optimizer.inner_optimizer)
    for seed in range(3):
        reference(good(seed))
        apply(scaled(good(seed), optimizer))
        before = numbers(watched)
        apply(bad(seed % 2, (np.inf, np.nan, -np.inf)[seed]))
        assert_identical(numbers(watched), before)
    assert optimizer.skipped_steps == 3
    for a, b in zip(numbers(ours), numbers(plain), strict=True):
        # A compiler may fuse, and so round, in another order.
        close = {"rtol": 1e-5, "atol": 1e-6} if mode != "eager" else {"rtol": 0}
        np.testing.assert_allclose(a, b, **close)
        assert not np.array_equal(a, np.ones_like(a))


# Both sets of arguments in every mode would take minutes, and so would what
# runs op by op on JAX.
ARGUMENTS = {"graph": {}}
in_each_mode = pytest.mark.parametrize(
    "mode", ["jit"] if BACKEND == "jax" else MODES
)


@in_each_mode
@pytest.mark.parametrize("make", CLASSES.values(), ids=CLASSES)
def test_bad_steps_change_nothing_and_good_ones_all(make, mode):
    compare(make, ARGUMENTS.get(mode, EVERYTHING), mode)


@pytest.mark.parametrize("mode", MODES[-1:])
@pytest.mark.parametrize(
    "clip", [{"clipvalue": 0.3}, {"global_clipnorm": 0.5}], ids=str
)
def test_other_ways_to_clip(clip, mode):
    compare(CLASSES["Adam"], clip, mode)


def test_op_by_op():
    compare(CLASSES["Adam"], EVERYTHING, "eager")


_ACCUMULATING = sorted({"Adam", "MultiOptimizer", "user's"} & set(CLASSES))


@in_each_mode
@pytest.mark.parametrize("name", _ACCUMULATING)
def test_with_gradient_accumulation(name, mode):
    accumulate = {"gradient_accumulation_steps": 2, "weight_decay": 0.1}
    compare(CLASSES[name], accumulate, mode)
