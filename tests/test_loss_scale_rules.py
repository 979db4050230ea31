"""Properties of the update rules that hold for every sequence of steps."""

import inspect
import json

import keras
import numpy as np
import pytest
from loss_scale_traces import random_overflows, trace_rule

from keras_mixprec import DynamicLossScale, ScheduledLossScale
from keras_mixprec.loss_scaling.rules import PRESETS

pytestmark = pytest.mark.one_backend

preset = DynamicLossScale.preset
schedules = keras.optimizers.schedules


# The scales of steps that overflow or not.
TRACES = {
    "table": (
        ScheduledLossScale({3: 2.0, 0: 8.0, 5: 1024.0}),
        [0, 1, 1, 0, 1, 0],
        [8.0, 8.0, 8.0, 2.0, 2.0, 1024.0],
    ),
    "schedule": (
        ScheduledLossScale(schedules.PolynomialDecay(1024.0, 4, 64.0)),
        [0, 1, 0, 1, 0, 1],
        [1024, 784, 544, 304, 64, 64],
    ),
}


@pytest.mark.parametrize("name", TRACES)
def test_scales_of_a_sequence(name):
    rule, overflows, expected = TRACES[name]
    state, scales = rule.initial_state(), []
    for overflow in overflows:
        scales.append(state.scale)
        state = rule.update(state, np.bool_(not overflow))
    np.testing.assert_allclose(scales, expected, rtol=1e-6)
    assert {scale.dtype for scale in scales} == {np.dtype("float32")}
    assert state.steps == len(overflows)


# For each argument, values that differ from the default and from each other.
VALUES = {
    "initial_scale": (1024.0, 2.0**20),
    "growth_factor": (1.25, 4.0),
    "backoff_factor": (0.3, 0.25),
    "growth_interval": (1, 12345),
    "hysteresis": (2, 4),
    "hysteresis_refill": ("good_step",),
    "min_scale": (None, 2.0**-20),
    "max_scale": (None, 2.0**40),
}


def arguments(rule):
    return list(inspect.signature(rule).parameters)


def copies(rule):
    """Made from its config, and from that in JSON."""
    saved = json.dumps(keras.saving.serialize_keras_object(rule))
    yield type(rule).from_config(rule.get_config())
    yield keras.saving.deserialize_keras_object(json.loads(saved))


def assert_survives(rule):
    for copy in copies(rule):
        assert copy == rule
        assert hash(copy) == hash(rule)
        assert repr(copy) == repr(rule)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_takes_every_override_and_keeps_its_quirks(name):
    for argument in arguments(DynamicLossScale):
        for value in VALUES[argument]:
            rule = preset(name, **{argument: value})
            assert getattr(rule, argument) == value
            assert_survives(rule)
    rule = preset(name, growth_interval=2, hysteresis=2)
    overflows = random_overflows(np.random.default_rng(6), 60, 20)
    for copy in copies(rule):
        expected = trace_rule(rule, overflows)
        np.testing.assert_array_equal(trace_rule(copy, overflows), expected)
