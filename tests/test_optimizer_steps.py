"""What the optimizer tells of its steps, also when nobody looks for long."""

import keras
import numpy as np
import pytest
from optimizer_models import (
    BACKEND,
    MODES,
    each_mode,
    last_mode,
    make_variables,
    numbers,
    over_modes,
    stepper,
)

from keras_mixprec import DynamicLossScale, LossScaleOptimizer

sgd = keras.optimizers.SGD
INF, NAN = np.inf, np.nan
GOOD = np.ones(2, "float32")
BAD = np.array([1, NAN], "float32")
KINDS = {"inf": np.isposinf, "-inf": np.isneginf, "nan": np.isnan}


@pytest.mark.one_backend
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
def test_counters_in_all_and_by_variable(mode):
    optimizer, variables, apply = stepper(mode, (2,), (2,))
    told = []
    for pair in (
        [GOOD, GOOD],
        [BAD, GOOD],
        [BAD, BAD],
        [GOOD, GOOD],
        [GOOD, BAD],
    ):
        apply(pair)
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
    first, second = (v.path for v in variables)
    assert optimizer.overflow_counts() == {first: 2, second: 2}
    steps = optimizer.nonfinite_steps()
    assert [s.variables for s in steps] == [[first], [first, second], [second]]


def kinds_of(variables, gradients):
    """Dict from the path of a variable to what NumPy finds, if anything."""
    return {
        v.path: [kind for kind, test in KINDS.items() if test(g).any()]
        for v, g in zip(variables, gradients, strict=True)
        if not np.isfinite(g).all()
    }


@over_modes("dtype", {"float32": ("float32",), "float16": ("float16",)})
def test_what_is_not_finite_is_what_numpy_finds(dtype, mode):
    shapes = (3, 2), (), (2,), (3, 2), (1, 2, 2, 3), ()
    optimizer, variables, apply = stepper(
        mode, *shapes, dtype=dtype, loss_scale=4.0
    )
    rng, steps = np.random.default_rng(0), []
    for _ in range(12):
        gradients = [np.ones(s, dtype) for s in shapes]
        for index in rng.integers(0, 6, rng.integers(0, 4)):
            place = tuple(rng.integers(0, n) for n in shapes[index])
            gradients[index][place] = rng.choice([INF, -INF, NAN])
        apply(gradients)
        steps.append(kinds_of(variables, gradients))
        # Those of the others are the true ones.
        for variable, gradient in zip(variables, gradients, strict=True):
            if variable.path not in steps[-1]:
                norm = optimizer.gradient_norms()[variable.path]
                assert norm == pytest.approx(gradient.size**0.5 / 4, rel=2e-6)
    bad = [step for step in steps if step]
    assert [s.variables for s in optimizer.nonfinite_steps()] == [
        *map(list, bad)
    ]
    assert [s.kinds for s in optimizer.nonfinite_steps()] == bad
    found = [{k for kinds in s.values() for k in kinds} for s in bad]
    counts = {kind: sum(kind in step for step in found) for kind in KINDS}
    assert min(counts.values()) > 0
    assert optimizer.nonfinite_counts() == counts


@last_mode
def test_the_last_32_bad_steps_are_kept(mode):
    optimizer, (first, _), apply = stepper(
        mode, (2,), (2,), initial_scale=2.0**32
    )
    for _ in range(40):
        apply([BAD, GOOD])
        apply([GOOD, GOOD])
    recent = optimizer.nonfinite_steps()
    assert [s.step for s in recent] == list(range(17, 80, 2))
    assert [s.scale for s in recent] == [2.0 ** (24 - k) for k in range(32)]
    assert all(s.variables == [first.path] for s in recent)
    assert optimizer.skipped_steps == 40
    assert optimizer.overflow_counts()[first.path] == 40


@pytest.mark.parametrize("xla", [mode == "xla" for mode in MODES[-1:]])
def test_steps_per_execution_loses_no_record(xla):
    x = np.ones((16, 2), "float32")
    x[[3, 6, 7, 12]] = NAN
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
def test_what_is_set_between_compiled_steps_takes_effect(mode):
    optimizer, (variable,), apply = stepper(
        mode, (2,), inner=sgd(1.0), initial_scale=4.0
    )
    for _ in range(5):
        apply([GOOD * 4])
    optimizer.learning_rate = 0.5
    optimizer.dynamic_growth_steps = 3
    apply([GOOD * 4])
    np.testing.assert_array_equal(numbers([variable])[0], [-4.5, -4.5])
    assert float(optimizer.loss_scale) == 8.0
    assert optimizer.dynamic_growth_steps == 3
    # As restored from a file, past the interval.
    optimizer.step_counter.assign(50)
    apply([GOOD])
    assert float(optimizer.loss_scale) == 16.0
    assert int(optimizer.step_counter.value) == 0


RULES = {
    # A table goes by attempted steps.
    "table": ({0: 8.0, 2: 4.0}, "gbg", [8.0, 4.0, 4.0]),
    "hysteresis": (DynamicLossScale(8.0, hysteresis=2), "bbb", [8.0, 4.0, 2.0]),
    "fixed": (8.0, "gbb", [8.0, 8.0, 8.0]),
}


@over_modes("rule,steps,expected", RULES)
def test_the_scale_follows_its_rule(rule, steps, expected, mode):
    optimizer, _, apply = stepper(mode, (2,), loss_scale=rule)
    scales = []
    for step in steps:
        apply([GOOD if step == "g" else BAD])
        scales.append(float(optimizer.loss_scale))
    assert scales == expected


# What each micro-batch of twelve is where it is not finite.
WINDOW = 3
WINDOWS = [
    {},
    {3: INF},
    {4: NAN},
    {5: -INF},
    {3: NAN, 4: INF},
    {3: INF, 5: NAN},
    {0: -INF, 8: NAN},
]


def weights_of(gradients):
    """A weight of 1 after each window: that of NumPy, windows as they fall."""
    weight, seen = 1.0, []
    for start in range(0, len(gradients), WINDOW):
        window = np.array(gradients[start : start + WINDOW])
        if np.isfinite(window).all():
            weight -= window.mean()
        seen.append(weight)
    return seen


@over_modes("bad", {str(bad): (bad,) for bad in WINDOWS})
def test_an_overflow_discards_the_whole_window(bad, mode):
    gradients = [float(bad.get(k, 2**k)) for k in range(12)]
    optimizer, (variable,), apply = stepper(
        mode,
        (1,),
        inner=sgd(1.0, gradient_accumulation_steps=WINDOW),
        initial_scale=4.0,
        discard_window=True,
    )
    seen = []
    for gradient in gradients:
        scale = float(optimizer.loss_scale)
        apply([np.array([gradient * scale], "float32")])
        seen.append(float(numbers([variable])[0][0]))
    expected = weights_of(gradients)
    np.testing.assert_allclose(seen[WINDOW - 1 :: WINDOW], expected, rtol=1e-6)
    # Those that fail alone are recorded, not all that are discarded.
    kinds = [s.kinds for s in optimizer.nonfinite_steps()]
    assert kinds == [{variable.path: [str(v)]} for v in bad.values()]
    assert optimizer.skipped_steps == len(bad)
    assert optimizer.attempted_steps == 12
    assert float(optimizer.loss_scale) == 4.0 / 2 ** len(bad)


def repeat(apply, gradient, times):
    for _ in range(times):
        apply([np.asarray(gradient, "float32")])


UNBOUNDED = {"min_scale": None, "max_scale": None}


@last_mode
@pytest.mark.parametrize(
    ("bounds", "low", "high"),
    [({}, 2.0**-14, 2.0**32), (UNBOUNDED, 2.0**-126, 2.0**126)],
    ids=["default", "none"],
)
def test_long_runs_of_bad_steps_and_of_none(bounds, low, high, mode):
    rule = DynamicLossScale(2.0**15, growth_interval=1, **bounds)
    optimizer, (variable,), apply = stepper(
        mode, (2,), inner=sgd(0.5), loss_scale=rule
    )
    times = 260  # More than from one end of the range to the other.
    repeat(apply, [NAN, INF], times)
    assert float(optimizer.loss_scale) == low
    assert optimizer.skipped_steps == times
    np.testing.assert_array_equal(numbers([variable])[0], [1, 1])
    repeat(apply, [low, 2 * low], 1)
    np.testing.assert_array_equal(numbers([variable])[0], [0.5, 0])
    repeat(apply, [0, 0], 3)
    assert float(optimizer.loss_scale) == 16 * low
    repeat(apply, [0, 0], times)
    assert float(optimizer.loss_scale) == high
    assert int(optimizer.iterations) == times + 4
    repeat(apply, [high, 2 * high], 1)
    np.testing.assert_array_equal(numbers([variable])[0], [0, -1])
    assert optimizer.skipped_steps == times
