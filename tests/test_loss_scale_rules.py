"""What holds for the update rules whatever the sequence and the backend."""

import keras
import numpy as np
import pytest
from loss_scale_traces import random_overflows, trace_rule

from keras_mixprec import DynamicLossScale, FixedLossScale, ScheduledLossScale
from keras_mixprec.loss_scaling.presets import PRESETS
from keras_mixprec.loss_scaling.rules import LossScaleState

# Keras compiles with `torch.compile` on torch, which takes a minute here.
COMPILERS = [False] if keras.backend.backend() == "torch" else [False, True]
SEQUENCES, STEPS = 32, 50


def some_rules():
    """Returns every preset with arguments that make it move, and the rest."""
    quick = {"growth_interval": 3, "hysteresis": 2}
    return [
        *(DynamicLossScale.preset(name, **quick) for name in PRESETS),
        DynamicLossScale.preset("deepspeed", hysteresis_refill="good_step"),
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


@pytest.mark.parametrize("jit_compile", COMPILERS, ids="jit={}".format)
def test_a_compiled_rule_equals_numpy(jit_compile):
    rules = some_rules()
    overflows = random_overflows(np.random.default_rng(2), STEPS, SEQUENCES)
    inputs = keras.Input(batch_shape=(SEQUENCES, STEPS), dtype="bool")
    model = keras.Model(inputs, Traces(rules)(inputs))
    model.compile(jit_compile=jit_compile)
    scales = model.predict_on_batch(overflows.T)
    for index, rule in enumerate(rules):
        expected = trace_rule(rule, overflows)
        np.testing.assert_array_equal(scales[..., index], expected, str(rule))


@pytest.mark.parametrize("rule", some_rules(), ids=repr)
@pytest.mark.parametrize("size", [(), (3,)], ids=["scalar", "batch"])
def test_an_update_keeps_shapes_and_dtypes(rule, size):
    state = LossScaleState(*(np.full(size, x) for x in rule.initial_state()))
    kinds = [(np.shape(leaf), leaf.dtype) for leaf in state]
    for finite in (True, False, True, True, True, False, False):
        state = rule.update(state, np.full(size, finite))
        assert [(np.shape(leaf), leaf.dtype) for leaf in state] == kinds
        assert np.all(state.hysteresis_left >= 1)


@pytest.mark.parametrize("growth_interval", [1, 2000])
@pytest.mark.parametrize("factors", [(2.0, 0.5), (3.7, 0.01)], ids=str)
def test_the_default_scale_stays_in_its_bounds(growth_interval, factors):
    rule = DynamicLossScale(
        growth_factor=factors[0],
        backoff_factor=factors[1],
        growth_interval=growth_interval,
    )
    overflows = random_overflows(np.random.default_rng(4), 20_000, 3)
    overflows[:10_000, 0], overflows[10_000:, 0] = True, False
    scales = trace_rule(rule, overflows)
    assert scales.min() == scales[10_000, 0] == rule.min_scale
    assert scales.max() <= rule.max_scale
    assert scales[-1, 0] > rule.min_scale


def test_without_bounds_growth_to_infinity_is_refused():
    rule = DynamicLossScale(growth_interval=1, max_scale=None)
    scales = trace_rule(rule, np.zeros((200, 1), bool))
    assert scales[-1] == 2.0**127


def test_growth_survives_a_lowered_interval():
    state = DynamicLossScale(growth_interval=100).initial_state()
    for _ in range(50):
        state = DynamicLossScale(growth_interval=100).update(state, True)
    lowered = DynamicLossScale(growth_interval=10)
    state = lowered.update(state, True)
    assert (state.scale, state.good_steps) == (2.0**16, 0)


def test_hysteresis_tolerates_then_backs_off_on_every_overflow():
    rule = DynamicLossScale(initial_scale=64.0, hysteresis=3, growth_interval=2)
    overflows = np.array([1, 1, 0, 1, 1, 0, 0, 1, 1, 1], bool)[:, None]
    scales = trace_rule(rule, overflows)[:, 0].tolist()
    assert scales == [64, 64, 64, 64, 32, 16, 16, 32, 32, 32]


def test_fixed_scale_never_moves_but_counts():
    rule, state = FixedLossScale(1000.0), FixedLossScale(1000.0).initial_state()
    for finite in (True, False, True, True):
        state = rule.update(state, finite)
    assert (state.scale, state.good_steps, state.steps) == (1000.0, 2, 4)


def test_a_table_follows_attempted_steps():
    rule = ScheduledLossScale({3: 2.0, 0: 8.0, 5: 1024.0})
    overflows = np.array([0, 1, 1, 0, 1, 0], bool)[:, None]
    scales = trace_rule(rule, overflows)[:, 0].tolist()
    assert scales == [8.0, 8.0, 8.0, 2.0, 2.0, 1024.0]


def test_a_schedule_follows_attempted_steps():
    schedule = keras.optimizers.schedules.PolynomialDecay(1024.0, 8, 64.0)
    rule = ScheduledLossScale(schedule)
    state, scales = rule.initial_state(), []
    for finite in (True, False) * 5:
        scales.append(state.scale)
        state = rule.update(state, finite)
    expected = 1024 - 120 * np.minimum(np.arange(10.0), 8)
    np.testing.assert_allclose(scales, expected, rtol=1e-6)
    assert scales[-1].dtype == np.float32
