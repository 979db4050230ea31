"""What the optimizer tells of its steps, also when nobody looks for long."""

import keras
import numpy as np
import pytest
from optimizer_models import (
    BACKEND,
    COMPILED,
    MODES,
    each_mode,
    make_apply,
    make_variables,
)

from keras_mixprec import DynamicLossScale, LossScaleOptimizer

GOOD = np.ones(2, "float32")
BAD = np.array([1, np.nan], "float32")


def make(mode, **arguments):
    variables = make_variables((2,), (2,))
    optimizer = LossScaleOptimizer("sgd", **arguments)
    return optimizer, variables, make_apply(optimizer, variables, mode)


def test_nothing_has_happened_before_the_first_step():
    optimizer = LossScaleOptimizer("sgd", initial_scale=8.0)
    for built in (False, True):
        assert float(optimizer.loss_scale) == 8.0
        assert optimizer.attempted_steps == optimizer.skipped_steps == 0
        assert optimizer.consecutive_skipped_steps == 0
        assert optimizer.last_step_skipped is False
        assert not any(optimizer.overflow_counts().values())
        assert not any(optimizer.gradient_norms().values())
        assert optimizer.nonfinite_steps() == []
        if not built:
            optimizer.build(make_variables((2,)))


@each_mode
def test_counters(mode):
    optimizer, _, apply = make(mode)
    told = []
    for first in (GOOD, BAD, BAD, GOOD, BAD):
        apply([first, GOOD])
        told.append(
            (
                optimizer.attempted_steps,
                int(optimizer.iterations),
                optimizer.skipped_steps,
                optimizer.consecutive_skipped_steps,
                optimizer.last_step_skipped,
            )
        )
    assert told == [
        (1, 1, 0, 0, False),
        (2, 1, 1, 1, True),
        (3, 1, 2, 2, True),
        (4, 2, 2, 0, False),
        (5, 2, 3, 1, True),
    ]


@each_mode
def test_overflows_are_counted_by_variable(mode):
    optimizer, variables, apply = make(mode)
    for pair in ([BAD, GOOD], [BAD, BAD], [GOOD, GOOD], [GOOD, BAD]):
        apply(pair)
    first, second = (v.path for v in variables)
    assert optimizer.overflow_counts() == {first: 2, second: 2}
    assert [s.variables for s in optimizer.nonfinite_steps()] == [
        [first],
        [first, second],
        [second],
    ]


@pytest.mark.parametrize("mode", MODES[-1:])
def test_the_last_32_bad_steps_are_kept(mode):
    optimizer, variables, apply = make(mode, initial_scale=2.0**40 / 2**8)
    for _ in range(40):
        apply([BAD, GOOD])
        apply([GOOD, GOOD])
    recent = optimizer.nonfinite_steps()
    assert [s.step for s in recent] == list(range(17, 80, 2))
    scales = [2.0 ** (32 - k) for k in range(8, 40)]
    assert [s.scale for s in recent] == scales
    assert all(s.variables == [variables[0].path] for s in recent)
    assert optimizer.skipped_steps == 40
    assert optimizer.overflow_counts()[variables[0].path] == 40


@each_mode
def test_a_growth_interval_set_on_a_compiled_step_takes_effect(mode):
    optimizer, _, apply = make(mode, initial_scale=4.0)
    for _ in range(5):
        apply([GOOD, GOOD])
    optimizer.dynamic_growth_steps = 3
    apply([GOOD, GOOD])
    assert float(optimizer.loss_scale) == 8.0
    assert optimizer.dynamic_growth_steps == 3


@each_mode
def test_a_restored_counter_past_the_interval_grows(mode):
    rule = DynamicLossScale(4.0, growth_interval=10)
    optimizer, _, apply = make(mode, loss_scale=rule)
    optimizer.step_counter.assign(50)
    apply([GOOD, GOOD])
    assert float(optimizer.loss_scale) == 8.0
    assert int(optimizer.step_counter.value) == 0


@pytest.mark.parametrize("xla", [mode == "xla" for mode in COMPILED] or [False])
def test_steps_per_execution_loses_no_record(xla):
    x = np.ones((16, 2), "float32")
    x[[3, 6, 7, 12]] = np.nan
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = LossScaleOptimizer("sgd")
    model.compile(
        optimizer,
        loss="mse",
        steps_per_execution=1 if BACKEND == "torch" else 4,
        jit_compile=xla if BACKEND == "tensorflow" else "auto",
    )
    model.fit(x, x[:, :1] * 0 + 1, batch_size=1, shuffle=False, verbose=0)
    recent = optimizer.nonfinite_steps()
    assert [s.step for s in recent] == [4, 7, 8, 13]
    assert [s.scale for s in recent] == [2.0**k for k in (15, 14, 13, 12)]
    assert all(len(s.variables) == 2 for s in recent)
    assert optimizer.attempted_steps == 16
    assert int(optimizer.iterations) == 12


@each_mode
def test_a_schedule_goes_by_attempted_steps(mode):
    table = {0: 8.0, 2: 4.0}
    optimizer, _, apply = make(mode, loss_scale=table)
    scales = []
    for first in (GOOD, BAD, GOOD):
        scales.append(float(optimizer.loss_scale))
        apply([first, GOOD])
    assert scales == [8.0, 8.0, 4.0]


@each_mode
def test_hysteresis_tolerates_a_bad_step(mode):
    rule = DynamicLossScale(8.0, hysteresis=2)
    optimizer, _, apply = make(mode, loss_scale=rule)
    scales = []
    for _ in range(3):
        apply([BAD, GOOD])
        scales.append(float(optimizer.loss_scale))
    assert scales == [8.0, 4.0, 2.0]
