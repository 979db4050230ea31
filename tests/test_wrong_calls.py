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

# Of each callable, by argument: values of a wrong range, and of a wrong type.
ARGUMENTS = {
    kmp.DynamicLossScale: {
        "initial_scale": (NO_SCALES, ["x", True, None, [1.0]]),
        "growth_factor": ([1, 0.5, INF], [None]),
        "backoff_factor": ([0, 1.0, 2, NAN], []),
        "growth_interval": ([0], [1.5, True, None]),
        "hysteresis": ([0], ["2"]),
        "hysteresis_refill": (["never", None], []),
        "min_scale": ([0, 2.0**16], []),
        "max_scale": ([1.0, INF], []),
    },
    preset: {"name": (["pytorch", None], [])},
    kmp.FixedLossScale: {"scale": ([0.0], ["dynamic", None])},
    kmp.ScheduledLossScale: {
        "schedule": ([{}, {1: 8.0}], [8.0, [8.0, 4.0]]),
    },
    LossScaleOptimizer: {"inner_optimizer": ([], [None, sgd, 0.1])},
    optimizer: {
        "loss_scale": ([*NO_SCALES, "static", "auto"], [[1.0], True, None]),
        "initial_scale": ([0], ["x"]),
        "discard_window": ([2], []),
    },
    kmp.ensure_loss_scaling: {"model": ([], NO_MODELS)},
    kmp.precision_summary: {"model": ([], NO_MODELS)},
    PrecisionPlan.from_model: {"model": ([], NO_MODELS)},
    PLAN.apply: {"model": ([], NO_MODELS)},
    PLAN.diff: {"other": ([], [{"dense": "float32"}])},
    apply: {
        "policy_or_plan": (
            ["mixed_float15", "plan.json", "int8_from_float32"],
            [16, None, {"dense": "float32"}],
        )
    },
    apply_rules: {"rules": ([], ["dense"])},
    kmp.PrecisionRules: {"rules": ([], [3])},
    rule: {
        "match": ([""], [3, dict]),
        "policy": (["float17"], []),
        "reason": ([], [1]),
        "sublayers": ([], ["all"]),
    },
    plan: {"policies": ([], [[("dense", "float32")]])},
    kmp.set_global_policy: {"policy": (["half"], [])},
    kmp.policy_scope: {"policy": (["float17"], [None])},
    kmp.set_matmul_precision: {
        "name": (["highest", "TF32", ""], [32, ["tf32"], None])
    },
    kmp.matmul_precision: {"name": (["highest", "TF32", ""], [32, ["tf32"]])},
    kmp.RescaledPolicy: {"input_bits": ([-31], [0.5])},
    kmp.graph_rewrite: {"dtype": (["mixed_float16", "tf32"], [16])},
    lambda **lists: kmp.graph_rewrite("bfloat16", **lists): {
        "deny": ([], ["Exp"]),
        "allow": ([], [3]),
        "infer": ([], ["Exp"]),
    },
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


def scheduled(schedule):
    return lambda: kmp.ScheduledLossScale(schedule)


def starting_at_zero():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.0, 5, 0.5)
    return kmp.ScheduledLossScale(schedule).initial_state()


own = keras.optimizers.LossScaleOptimizer
policies = keras.dtype_policies
DYNAMIC = kmp.DynamicLossScale()
RESCALED = "rescaled(31,0)_from_mixed_float16"

# What goes by more than one argument, or is told by another name.
WRONG_VALUES = {
    "hysteresis=0": lambda: preset("torch", hysteresis=0),
    "max_scale=8.0": lambda: preset("megatron", max_scale=8.0),
    "step=-3": scheduled({0: 8.0, -3: 4.0}),
    r"schedule\[9\]=0.0": scheduled({0: 8.0, 9: 0.0}),
    r"schedule\(0\)": starting_at_zero,
    "sdg": lambda: LossScaleOptimizer("sdg"),
    "inner_optimizer=<": lambda: LossScaleOptimizer(optimizer()),
    "inner_optimizer=.*<": lambda: LossScaleOptimizer(own(sgd())),
    "schedule={}": lambda: optimizer(loss_scale={}),
    "interval=0": lambda: optimizer(dynamic_growth_steps=0),
    "initial_scale=4.0": lambda: optimizer(loss_scale=8.0, initial_scale=4.0),
    "dynamic_growth_steps=5": lambda: optimizer(
        loss_scale=DYNAMIC, dynamic_growth_steps=5
    ),
    "initial_scale=None": lambda: optimizer(dynamic=False),
    "`scale`": lambda: optimizer(scale=8.0),
    "set `clipnorm`": lambda: optimizer(clipnorm=1.0),
    "accumulation_steps=None": lambda: optimizer(discard_window=True),
    "compile": lambda: kmp.ensure_loss_scaling(model()),
    "map_float32": lambda: apply(policies.DTypePolicyMap()),
    "leave out `rules`": lambda: kmp.apply_policy(model(), PLAN, rules=[]),
    "'dens'.*'dense'": lambda: apply(plan({"dens": "float32"})),
    "'dense'.*float17": lambda: plan({"dense": "float17"}),
    "reasons.*dense": lambda: plan(reasons={"dense": "why"}),
    "'a'": lambda: plan({"a": RESCALED}),
    "float15": lambda: kmp.RescaledPolicy(1, source_name="float15"),
}
WRONG_TYPES = {
    "growth": lambda: preset("torch", growth=2),
    "step=1.5": scheduled({0: 8.0, 1.5: 4.0}),
    r"schedule\[0\]=None": scheduled({0: None}),
    "interval=1.5": lambda: optimizer(dynamic_growth_steps=1.5),
    "model='model'": lambda: kmp.apply_policy("model", "float32"),
    "DTypePolicy": lambda: plan({"dense": policies.DTypePolicy("float32")}),
    "<model>": lambda: plan(default=None),
    "plan={}": lambda: kmp.precision_summary(model(), {}),
    "`rules`.*'dense'": lambda: apply_rules(["dense"]),
    "`rules`.*1": lambda: kmp.policy_scope("float32", rules=[1]),
    "SGD": lambda: kmp.graph_rewrite("bfloat16", infer=[sgd]),
}


@pytest.mark.parametrize("match", [*WRONG_VALUES, *WRONG_TYPES])
def test_a_wrong_call_is_refused(match):
    wrong_value = match in WRONG_VALUES
    call = (WRONG_VALUES if wrong_value else WRONG_TYPES)[match]
    with pytest.raises(ValueError if wrong_value else TypeError, match=match):
        call()
    assert keras.config.dtype_policy().name == "float32"


ONE = ops.ones((2,))


def with_a_second_factor(optimizer, variables):
    optimizer.inner_optimizer.loss_scale_factor = 8.0
    try:
        optimizer.apply([ONE, ONE])
    finally:
        optimizer.inner_optimizer.loss_scale_factor = None


# Of an optimizer that is built, with a fixed scale of 8.
STEPS = {
    "1 gradients for 2": lambda o, v: o.apply([ONE], v),
    "3 gradients for 2": lambda o, v: o.apply([ONE] * 3),
    "No gradients provided": lambda o, v: o.apply([None, None]),
    "Unknown variable": lambda o, v: o.apply([ONE], stepper("eager", (2,))[1]),
    "steps=5": lambda o, v: setattr(o, "dynamic_growth_steps", 5),
    "loss_scale_factor=8.0": with_a_second_factor,
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
