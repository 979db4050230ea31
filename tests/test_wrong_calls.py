"""Wrong calls of the optimizer, rules, policies and plans: each is refused.

The error names the argument and the value received, and nothing has changed.
"""

import math
import re

import keras
import numpy as np
import pytest
from keras import layers, ops
from optimizer_models import numbers, stepper

import keras_mixprec as kmp
from keras_mixprec import LossScaleOptimizer, PrecisionPlan, PrecisionRule
from keras_mixprec.policies import graph_rewrite

pytestmark = pytest.mark.one_backend

INF, NAN = math.inf, math.nan
sgd = keras.optimizers.SGD
preset = kmp.DynamicLossScale.preset


def model():
    return keras.Sequential([keras.Input((2,)), layers.Dense(2)])


def optimizer(**arguments):
    return LossScaleOptimizer(sgd(), **arguments)


def apply(policy_or_plan):
    return kmp.apply_policy(model(), policy_or_plan)


def apply_rules(rules):
    return kmp.apply_policy(model(), "mixed_float16", rules=rules)


def rule(match="dense", **arguments):
    return PrecisionRule(match, **arguments)


def plan(policies=None, **arguments):
    return PrecisionPlan(policies or {}, **arguments)


PLAN = plan({"dense": "float32"})
NO_MODELS = ["model", 3, None, layers.Dense(1)]
NO_SCALES = [0, -8.0, INF, NAN, 1e38]

# Arguments of each callable, with values of a wrong range and of a wrong type.
ARGUMENTS = {
    kmp.DynamicLossScale: {
        "initial_scale": (NO_SCALES, ["x", True, None, [1.0]]),
        "growth_factor": ([1, 0.5, INF], [None]),
        "hysteresis": ([0], ["2"]),
        "hysteresis_refill": (["never", None], []),
        "min_scale": ([0, 2.0**16], []),
        "max_scale": ([1.0, INF], []),
    },
    preset: {"name": (["pytorch", None], [])},
    kmp.FixedLossScale: {"scale": ([0.0], ["dynamic", None])},
    kmp.ScheduledLossScale: {"schedule": ([{}, {1: 8.0}], [8.0, [8.0, 4.0]])},
    LossScaleOptimizer: {"inner_optimizer": ([], [None, sgd, 0.1])},
    optimizer: {
        "loss_scale": ([*NO_SCALES, "static", "auto"], [[1.0], True, None]),
        "initial_scale": ([0], ["x"]),
        "discard_window": ([2], []),
    },
    kmp.ensure_loss_scaling: {"model": ([], NO_MODELS)},
    apply: {
        "policy_or_plan": (
            ["mixed_float15", "plan.json", "int8_from_float32"],
            [16, None, {"dense": "float32"}],
        )
    },
    apply_rules: {"rules": ([], ["dense"])},
    rule: {
        "match": ([""], [3, dict]),
        "policy": (["float17"], []),
        "reason": ([], [1]),
        "sublayers": ([], ["all"]),
    },
    kmp.policy_scope: {"policy": (["float17"], [None])},
    kmp.set_matmul_precision: {
        "name": (["highest", "TF32", ""], [32, ["tf32"], None])
    },
    kmp.RescaledPolicy: {"input_bits": ([-31], [0.5])},
    kmp.graph_rewrite: {"dtype": (["mixed_float16", "tf32"], [16])},
}
CASES = [
    (call, name, value, error)
    for call, arguments in ARGUMENTS.items()
    for name, kinds in arguments.items()
    for values, error in zip(kinds, (ValueError, TypeError), strict=True)
    for value in values
]


@pytest.mark.parametrize(("call", "name", "value", "error"), CASES)
def test_a_wrong_argument_is_named_with_its_value(call, name, value, error):
    with pytest.raises(error, match=re.escape(f"{name}={value!r}")):
        call(**{name: value})
    assert keras.config.dtype_policy().name == "float32"
    assert graph_rewrite.in_force() is None


def starting_at_zero():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.0, 5, 0.5)
    return kmp.ScheduledLossScale(schedule).initial_state()


own = keras.optimizers.LossScaleOptimizer
policies = keras.dtype_policies

# Errors that depend on several arguments, or name another one.
WRONG_CALLS = {
    "max_scale=8.0": lambda: preset("megatron", max_scale=8.0),
    r"schedule\(0\)": starting_at_zero,
    "sdg": lambda: LossScaleOptimizer("sdg"),
    "inner_optimizer=<": lambda: LossScaleOptimizer(optimizer()),
    "inner_optimizer=.*<": lambda: LossScaleOptimizer(own(sgd())),
    "initial_scale=4.0": lambda: optimizer(loss_scale=8.0, initial_scale=4.0),
    "set `clipnorm`": lambda: optimizer(clipnorm=1.0),
    "accumulation_steps=None": lambda: optimizer(discard_window=True),
    "compile": lambda: kmp.ensure_loss_scaling(model()),
    "map_float32": lambda: apply(policies.DTypePolicyMap()),
    "leave out `rules`": lambda: kmp.apply_policy(model(), PLAN, rules=[]),
    "'dens'.*'dense'": lambda: apply(plan({"dens": "float32"})),
}


@pytest.mark.parametrize("match", WRONG_CALLS)
def test_a_wrong_call_is_refused(match):
    with pytest.raises(ValueError, match=match):
        WRONG_CALLS[match]()
    assert keras.config.dtype_policy().name == "float32"


ONE = ops.ones((2,))


# Wrong calls of a built optimizer with a fixed scale of 8.
STEPS = {
    "1 gradients for 2": lambda o, v: o.apply([ONE], v),
    "No gradients provided": lambda o, v: o.apply([None, None]),
    "Unknown variable": lambda o, v: o.apply([ONE], stepper("eager", (2,))[1]),
    **{
        f"scale={value!r}": lambda o, v, value=value: o.set_loss_scale(value)
        for value in NO_SCALES
    },
}


@pytest.mark.parametrize("match", STEPS)
def test_a_wrong_step_does_no_harm(match):
    optimizer, variables, apply = stepper(
        "eager", (2,), (2,), inner=sgd(1.0), loss_scale=8.0
    )
    with pytest.raises(ValueError, match=re.escape(match)):
        STEPS[match](optimizer, variables)
    assert optimizer.attempted_steps == 0
    apply([ONE * 8, ONE * 16])
    assert [v[0] for v in numbers(variables)] == [0, -1]


def test_what_needs_a_built_optimizer_says_so():
    optimizer = LossScaleOptimizer("sgd")
    for method, arguments in (
        ("set_loss_scale", (8.0,)),
        ("stateless_scale_loss", ([], 1.0)),
    ):
        with pytest.raises(ValueError, match=f"`{method}` needs.*built"):
            getattr(optimizer, method)(*arguments)
    with pytest.raises(ValueError, match="been built yet"):
        optimizer.apply([ONE])
    with pytest.raises(TypeError, match="growth_interval='often'"):
        optimizer.dynamic_growth_steps = "often"
    optimizer.apply([ONE], stepper("eager", (2,))[1])
    assert optimizer.attempted_steps == 1


def test_a_factor_of_the_inner_optimizer_is_dropped_with_a_warning():
    inner = sgd(1.0, loss_scale_factor=64.0)
    with pytest.warns(UserWarning, match="loss_scale_factor=64.0"):
        _, variables, apply = stepper(
            "eager", (2,), inner=inner, loss_scale=8.0
        )
    apply([ONE * 8])
    np.testing.assert_array_equal(numbers(variables)[0], [0, 0])
