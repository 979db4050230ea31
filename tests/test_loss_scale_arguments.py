"""Configs, equality and wrong arguments of the update rules."""

import inspect
import json
import math

import keras
import numpy as np
import pytest
from loss_scale_traces import random_overflows, trace_rule

from keras_mixprec import DynamicLossScale, FixedLossScale, ScheduledLossScale
from keras_mixprec.loss_scaling.presets import PRESETS
from keras_mixprec.loss_scaling.rules import LossScale

decay = keras.optimizers.schedules.ExponentialDecay

# For each argument, values that differ from the default and from each other.
VALUES = {
    "initial_scale": (3.0, 2.0**20),
    "growth_factor": (1.25, 4.0),
    "backoff_factor": (0.3, 0.25),
    "growth_interval": (1, 12345),
    "hysteresis": (2, 4),
    "hysteresis_refill": ("good_step",),
    "min_scale": (None, 2.0**-20, 8.0),
    "max_scale": (None, 2.0**40, 2.0**15),
    "scale": (1.0, 1000.0, 2.0**126),
    "schedule": ({0: 1.0}, {0: 1.0, 10: 7.5}, decay(8.0, 5, 0.5)),
}
RULES = [
    rule for rule in LossScale.__subclasses__() if "mixprec" in rule.__module__
]
ARGUMENTS = [
    (rule, name)
    for rule in RULES
    for name in inspect.signature(rule).parameters
]
each_preset = pytest.mark.parametrize("preset", PRESETS)


def through_json(rule):
    saved = json.dumps(keras.saving.serialize_keras_object(rule))
    return keras.saving.deserialize_keras_object(json.loads(saved))


def test_every_rule_and_argument_is_enrolled():
    assert {name for _, name in ARGUMENTS} == set(VALUES)
    assert set(RULES) == {DynamicLossScale, FixedLossScale, ScheduledLossScale}


@pytest.mark.parametrize(
    ("rule", "name"), ARGUMENTS, ids=lambda x: getattr(x, "__name__", x)
)
def test_every_argument_survives_its_config(rule, name):
    made = [rule(**{name: value}) for value in VALUES[name]]
    for original, value in zip(made, VALUES[name], strict=True):
        config = original.get_config()
        for copy in (rule.from_config(config), through_json(original)):
            assert copy == original
            assert hash(copy) == hash(original)
            assert repr(copy) == repr(original)
            if not isinstance(value, decay):
                assert getattr(copy, name) == value
    assert len(set(made)) == len(made), "different arguments, equal rules"


@each_preset
def test_a_preset_survives_its_config_with_its_quirks(preset):
    rule = DynamicLossScale.preset(preset, growth_interval=2, hysteresis=2)
    overflows = random_overflows(np.random.default_rng(6), 60, 20)
    for copy in (
        DynamicLossScale.from_config(rule.get_config()),
        through_json(rule),
    ):
        assert copy == rule
        assert hash(copy) == hash(rule)
        assert (copy.growth_interval, copy.hysteresis) == (2, 2)
        np.testing.assert_array_equal(
            trace_rule(copy, overflows), trace_rule(rule, overflows)
        )


@each_preset
@pytest.mark.parametrize("name", inspect.signature(DynamicLossScale).parameters)
def test_a_preset_takes_every_override(preset, name):
    for value in VALUES[name]:
        if name == "initial_scale":
            value = 1024.0  # Within every preset's bounds.
        if name in ("min_scale", "max_scale") and value is not None:
            value = 2.0**-20 if name == "min_scale" else 2.0**40
        rule = DynamicLossScale.preset(preset, **{name: value})
        assert getattr(rule, name) == value
        assert through_json(rule) == rule


def test_equality_and_hash():
    assert DynamicLossScale() == DynamicLossScale(initial_scale=2**15)
    assert DynamicLossScale() != DynamicLossScale.preset("keras")
    assert FixedLossScale(8) == FixedLossScale(np.float32(8.0))
    assert FixedLossScale(8.0) != ScheduledLossScale({0: 8.0})
    assert ScheduledLossScale({0: 1, 5: 2}) == ScheduledLossScale({5: 2, 0: 1})
    assert FixedLossScale(8.0) != 8.0


def dynamic(**arguments):
    return lambda: DynamicLossScale(**arguments)


def preset(*arguments, **overrides):
    return lambda: DynamicLossScale.preset(*arguments, **overrides)


def scheduled(schedule):
    return lambda: ScheduledLossScale(schedule)


WRONG_CALLS = [
    (dynamic(initial_scale=0), ValueError, "initial_scale=0"),
    (dynamic(initial_scale=-1.0), ValueError, "initial_scale=-1.0"),
    (dynamic(initial_scale=math.inf), ValueError, "initial_scale=inf"),
    (dynamic(initial_scale=math.nan), ValueError, "initial_scale=nan"),
    (dynamic(initial_scale=2.0**127), ValueError, "normal float32"),
    (dynamic(initial_scale="x"), TypeError, "initial_scale='x'"),
    (dynamic(initial_scale=True), TypeError, "initial_scale=True"),
    (dynamic(initial_scale=None), TypeError, "initial_scale=None"),
    (dynamic(initial_scale=[1.0]), TypeError, "must be a number"),
    (dynamic(growth_factor=1), ValueError, "greater than 1"),
    (dynamic(growth_factor=0.5), ValueError, "growth_factor=0.5"),
    (dynamic(growth_factor=math.inf), ValueError, "growth_factor=inf"),
    (dynamic(growth_factor=None), TypeError, "growth_factor=None"),
    (dynamic(backoff_factor=0), ValueError, "strictly between 0 and 1"),
    (dynamic(backoff_factor=1.0), ValueError, "strictly between 0 and 1"),
    (dynamic(backoff_factor=2), ValueError, "backoff_factor=2"),
    (dynamic(backoff_factor=math.nan), ValueError, "backoff_factor=nan"),
    (dynamic(growth_interval=0), ValueError, "at least 1"),
    (dynamic(growth_interval=1.5), TypeError, "must be an integer"),
    (dynamic(growth_interval=True), TypeError, "growth_interval=True"),
    (dynamic(growth_interval=None), TypeError, "growth_interval=None"),
    (dynamic(hysteresis=0), ValueError, "hysteresis=0"),
    (dynamic(hysteresis="2"), TypeError, "hysteresis='2'"),
    (dynamic(hysteresis_refill="never"), ValueError, "'growth', 'good_step'"),
    (dynamic(hysteresis_refill=None), ValueError, "hysteresis_refill=None"),
    (dynamic(min_scale=0), ValueError, "min_scale=0"),
    (dynamic(min_scale=2.0**16), ValueError, "between `min_scale` and"),
    (dynamic(max_scale=1.0), ValueError, "max_scale=1.0"),
    (dynamic(max_scale=math.inf), ValueError, "max_scale=inf"),
    (preset("pytorch"), ValueError, "'torch', 'keras'.*name='pytorch'"),
    (preset(None), ValueError, "name=None"),
    (preset("torch", growth=2), TypeError, r"\['growth'\]; it takes"),
    (preset("torch", hysteresis=0), ValueError, "hysteresis=0"),
    (preset("megatron", max_scale=2.0**20), ValueError, "max_scale=1048576"),
    (lambda: FixedLossScale(0.0), ValueError, "scale=0.0"),
    (lambda: FixedLossScale("dynamic"), TypeError, "scale='dynamic'"),
    (lambda: FixedLossScale(None), TypeError, "scale=None"),
    (scheduled({}), ValueError, "needs a scale for step 0"),
    (scheduled({1: 8.0}), ValueError, "needs a scale for step 0"),
    (scheduled({0: 8.0, -3: 4.0}), ValueError, "schedule step=-3"),
    (scheduled({0: 8.0, 1.5: 4.0}), TypeError, "schedule step=1.5"),
    (scheduled({0: 8.0, 9: 0.0}), ValueError, r"schedule\[9\]=0.0"),
    (scheduled({0: None}), TypeError, r"schedule\[0\]=None"),
    (scheduled(8.0), TypeError, "schedule=8.0 of type float"),
    (scheduled([8.0, 4.0]), TypeError, "LearningRateSchedule"),
]


@pytest.mark.parametrize(
    ("call", "error", "match"), WRONG_CALLS, ids=[w[2] for w in WRONG_CALLS]
)
def test_wrong_calls_say_what_is_wrong(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_schedule_that_starts_at_zero_is_refused():
    # The step of a rule is checked when the first state is made.
    with pytest.raises(ValueError, match=r"schedule\(0\)"):
        ScheduledLossScale(decay(0.0, 5, 0.5)).initial_state()
