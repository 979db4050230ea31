"""The update rules of the loss scale: what holds whatever the sequence."""

import inspect
import json

import keras
import numpy as np
import pytest
from loss_scale_traces import random_overflows, trace_rule

from keras_mixprec import DynamicLossScale, FixedLossScale, ScheduledLossScale
from keras_mixprec.loss_scaling.presets import PRESETS
from keras_mixprec.loss_scaling.rules import LossScale, LossScaleState

preset = DynamicLossScale.preset
schedules = keras.optimizers.schedules
decay = schedules.ExponentialDecay
# Keras compiles with `torch.compile` on torch, which takes a minute here.
COMPILES = keras.backend.backend() != "torch"
SEQUENCES, STEPS = 32, 50


def some_rules():
    """Returns every preset with arguments that make it move, and the rest."""
    quick = {"growth_interval": 3, "hysteresis": 2}
    return [
        *(preset(name, **quick) for name in PRESETS),
        preset("deepspeed", hysteresis_refill="good_step"),
        DynamicLossScale(growth_factor=1.5, backoff_factor=0.75),
        DynamicLossScale(initial_scale=4.0, max_scale=16.0, min_scale=2.0),
        FixedLossScale(1000.0),
        ScheduledLossScale({0: 8.0, 7: 2.0, 30: 64.0}),
    ]


class Traces(keras.layers.Layer):
    """Maps overflows `(sequences, steps)` to `(steps, sequences, rules)`."""

    def __init__(self, rules):
        super().__init__()
        self.rules = rules

    def call(self, overflows):
        states = [
            LossScaleState(*(keras.ops.full((SEQUENCES,), x) for x in initial))
            for initial in (rule.initial_state() for rule in self.rules)
        ]
        columns = keras.ops.transpose(overflows)
        _, traces = keras.ops.scan(self.step, states, columns)
        return keras.ops.stack([states.scale for states in traces], axis=-1)

    def step(self, states, overflow):
        finite = keras.ops.logical_not(overflow)
        after = [
            rule.update(state, finite)
            for rule, state in zip(self.rules, states, strict=True)
        ]
        # TensorFlow's `scan` wants what it stacks to look like its state.
        return after, states


def test_a_compiled_rule_equals_numpy():
    rules = some_rules()
    overflows = random_overflows(np.random.default_rng(2), STEPS, SEQUENCES)
    inputs = keras.Input(batch_shape=(SEQUENCES, STEPS), dtype="bool")
    model = keras.Model(inputs, Traces(rules)(inputs))
    model.compile(jit_compile=COMPILES)
    scales = model.predict_on_batch(overflows.T)
    for index, rule in enumerate(rules):
        expected = trace_rule(rule, overflows)
        np.testing.assert_array_equal(scales[..., index], expected, str(rule))


@pytest.mark.one_backend
@pytest.mark.parametrize("rule", some_rules(), ids=repr)
def test_an_update_keeps_shapes_and_dtypes(rule):
    for size in (), (3,):
        state = LossScaleState(
            *(np.full(size, x) for x in rule.initial_state())
        )
        kinds = [(np.shape(leaf), leaf.dtype) for leaf in state]
        for finite in (True, False, True, True, True, False, False):
            state = rule.update(state, np.full(size, finite))
            assert [(np.shape(leaf), leaf.dtype) for leaf in state] == kinds
            assert np.all(state.hysteresis_left >= 1)


@pytest.mark.one_backend
@pytest.mark.parametrize("growth_interval", [1, 2000])
@pytest.mark.parametrize("factors", [(2.0, 0.5), (3.7, 0.01)], ids=str)
def test_the_default_scale_stays_in_its_bounds(growth_interval, factors):
    rule = DynamicLossScale(2.0**15, *factors, growth_interval)
    overflows = random_overflows(np.random.default_rng(4), 5000, 3)
    overflows[:2500, 0], overflows[2500:, 0] = True, False
    scales = trace_rule(rule, overflows)
    assert scales.min() == scales[2500, 0] == rule.min_scale
    assert scales.max() <= rule.max_scale
    assert scales[-1, 0] > rule.min_scale


# The scales of steps that overflow or not.
TRACES = {
    "no infinity": (
        DynamicLossScale(2.0**125, growth_interval=1, max_scale=None),
        [0, 0, 0, 0],
        [2.0**125, 2.0**126, 2.0**127, 2.0**127],
    ),
    "hysteresis": (
        DynamicLossScale(64.0, hysteresis=3, growth_interval=2),
        [1, 1, 0, 1, 1, 0, 0, 1, 1, 1],
        [64, 64, 64, 64, 32, 16, 16, 32, 32, 32],
    ),
    "fixed": (FixedLossScale(1000), [0, 1, 0], [1000] * 3),
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


@pytest.mark.one_backend
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


@pytest.mark.one_backend
def test_growth_survives_a_lowered_interval():
    rule = DynamicLossScale(growth_interval=100)
    state = rule.initial_state()
    for _ in range(50):
        state = rule.update(state, True)
    state = DynamicLossScale(growth_interval=10).update(state, True)
    assert (state.scale, state.good_steps) == (2.0**16, 0)


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
    "scale": (1.0, 1000.0, 2.0**126),
    "schedule": ({0: 1.0}, {0: 1.0, 10: 7.5}, decay(8.0, 5, 0.5)),
}
RULES = [
    rule for rule in LossScale.__subclasses__() if "mixprec" in rule.__module__
]


def arguments(rule):
    return list(inspect.signature(rule).parameters)


ARGUMENTS = [(rule, name) for rule in RULES for name in arguments(rule)]


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


@pytest.mark.one_backend
def test_every_rule_and_argument_is_enrolled():
    assert {name for _, name in ARGUMENTS} == set(VALUES)
    assert set(RULES) == {DynamicLossScale, FixedLossScale, ScheduledLossScale}


@pytest.mark.one_backend
@pytest.mark.parametrize(("rule", "name"), ARGUMENTS)
def test_every_argument_survives_its_config(rule, name):
    made = [rule(**{name: value}) for value in VALUES[name]]
    for each, value in zip(made, VALUES[name], strict=True):
        assert_survives(each)
        assert isinstance(value, decay) or getattr(each, name) == value
    # Different arguments, different rules.
    assert len(set(made)) == len(made)


@pytest.mark.one_backend
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


@pytest.mark.one_backend
def test_equality():
    assert DynamicLossScale() == DynamicLossScale(initial_scale=2**15)
    assert DynamicLossScale() != preset("keras")
    assert FixedLossScale(8) == FixedLossScale(np.float32(8.0))
    assert FixedLossScale(8.0) != ScheduledLossScale({0: 8.0})
    assert ScheduledLossScale({0: 1, 5: 2}) == ScheduledLossScale({5: 2, 0: 1})
    assert FixedLossScale(8.0) != 8.0
