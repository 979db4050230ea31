"""Weights, scales and counters of a custom loop equal those of NumPy."""

import keras
import numpy as np
import pytest
from optimizer_models import each_mode, numbers, over_modes, stepper

from keras_mixprec import DynamicLossScale, FixedLossScale, ScheduledLossScale
from keras_mixprec.loss_scaling.rules import PRESETS

sgd = keras.optimizers.SGD
INF, NAN = np.inf, np.nan
KINDS = {"inf": np.isposinf, "-inf": np.isneginf, "nan": np.isnan}
SHAPES = (3, 2), (), (2,), (3, 2), (1, 2, 2, 3), ()
WINDOW = 3


class Run:
    """Steps of SGD in NumPy, with a rate of 1 and weights of 1."""

    def __init__(self, rule, window):
        self.rule, self.window = rule, window
        self.state = rule.initial_state()
        self.weights = [np.ones(s) for s in SHAPES]
        self.given, self.skipped = [], []
        self.counts = [0] * len(SHAPES)
        self.kinds = dict.fromkeys(KINDS, 0)
        self.consecutive = 0

    def step(self, gradients):
        """Takes a step, alone or as one of a window of three."""
        bad = {
            i: [kind for kind, test in KINDS.items() if test(g).any()]
            for i, g in enumerate(gradients)
            if not np.isfinite(g).all()
        }
        self.norms = {
            i: np.linalg.norm(g.astype("float64")) / self.state.scale
            for i, g in enumerate(gradients)
            if i not in bad
        }
        if bad:
            number, scale = int(self.state.steps) + 1, float(self.state.scale)
            self.skipped.append((number, scale, bad))
            for kind in {kind for held in bad.values() for kind in held}:
                self.kinds[kind] += 1
            for index in bad:
                self.counts[index] += 1
        self.consecutive = self.consecutive + 1 if bad else 0
        true = [g.astype("float64") / self.state.scale for g in gradients]
        self.given.append(None if bad else true)
        before = [(leaf.shape, leaf.dtype) for leaf in self.state]
        self.state = self.rule.next_state(self.state, np.bool_(not bad))
        assert [(leaf.shape, leaf.dtype) for leaf in self.state] == before
        assert self.state.hysteresis_left >= 1
        if len(self.given) == self.window:
            if None not in self.given:
                for weight, *parts in zip(
                    self.weights, *self.given, strict=True
                ):
                    weight -= np.mean(parts, axis=0)
            self.given = []


# The rule, the dtype of the weights, and how many micro-batches make a step.
RUNS = {
    "default": (DynamicLossScale(2.0**40, max_scale=None), "float32", 1),
    "float16": (DynamicLossScale(64.0, growth_interval=3), "float16", 1),
    "window": (DynamicLossScale(4.0), "float32", WINDOW),
    "hysteresis": (DynamicLossScale(2.0**20, hysteresis=2), "float32", 1),
    "factors": (DynamicLossScale(8.0, 1.5, 0.75), "float32", 1),
    "bounds": (
        DynamicLossScale(4.0, min_scale=2.0, max_scale=16.0),
        "float32",
        1,
    ),
    "fixed": (FixedLossScale(8.0), "float32", 1),
    "table": (ScheduledLossScale({0: 8.0, 20: 4.0}), "float32", 1),
}
QUICK_TO_MOVE = {"growth_interval": 3, "hysteresis": 2}
RUNS |= {
    name: (DynamicLossScale.preset(name, **QUICK_TO_MOVE), "float32", 1)
    for name in PRESETS
}
refill = DynamicLossScale.preset("deepspeed", hysteresis_refill="good_step")
RUNS["refill"] = refill, "float32", 1


@pytest.mark.long
@over_modes("rule,dtype,window", RUNS, quick=5)
def test_a_run_is_that_of_numpy(rule, dtype, window, mode):
    windows = {"gradient_accumulation_steps": window} if window > 1 else {}
    optimizer, variables, apply = stepper(
        mode,
        *SHAPES,
        inner=sgd(1.0, **windows),
        dtype=dtype,
        loss_scale=rule,
        discard_window=window > 1,
    )
    paths = [v.path for v in variables]
    run, rng = Run(rule, window), np.random.default_rng(0)
    for _ in range(60):
        factor = np.float32(run.state.scale) / 64
        gradients = [
            np.asarray(rng.integers(-4, 5, s) * factor, "float32")
            for s in SHAPES
        ]
        for index in rng.integers(0, 6, max(rng.integers(-2, 4), 0)):
            place = tuple(rng.integers(0, n) for n in SHAPES[index])
            gradients[index][place] = rng.choice([INF, -INF, NAN])
        apply(gradients)
        run.step(gradients)
        assert float(optimizer.loss_scale) == run.state.scale
        skipped, told = len(run.skipped), run.consecutive
        assert optimizer.step_counts() == (run.state.steps, skipped, told)
        assert optimizer.last_step_skipped is (told > 0)
        for index, norm in run.norms.items():
            found = optimizer.gradient_norms()[paths[index]]
            assert found == pytest.approx(norm, rel=2e-6)
    assert skipped > 32
    assert optimizer.attempted_steps == 60
    assert optimizer.consecutive_skipped_steps == run.consecutive
    # The last 32 are kept.
    assert [(*s[:3], s.kinds) for s in optimizer.nonfinite_steps()] == [
        (n, scale, [paths[i] for i in bad], {paths[i]: bad[i] for i in bad})
        for n, scale, bad in run.skipped[-32:]
    ]
    changes = optimizer.history.read_changes()
    kept = [change.step for change in changes if change.was_skipped]
    assert kept == [s[0] for s in run.skipped]
    assert list(optimizer.overflow_counts().values()) == run.counts
    assert optimizer.nonfinite_counts() == run.kinds
    for value, weight in zip(numbers(variables), run.weights, strict=True):
        assert not np.array_equal(weight, np.ones_like(weight))
        np.testing.assert_allclose(value, weight, rtol=1e-6, atol=1e-6)


@each_mode
def test_what_is_set_between_compiled_steps_takes_effect(mode):
    optimizer, (variable,), apply = stepper(
        mode, (2,), inner=sgd(1.0), initial_scale=4.0
    )
    good = np.full(2, 4.0, "float32")
    for _ in range(5):
        apply([good])
    optimizer.learning_rate = 0.5
    optimizer.dynamic_growth_steps = 3
    apply([good])
    np.testing.assert_array_equal(numbers([variable])[0], [-4.5, -4.5])
    assert float(optimizer.loss_scale) == 8.0
    # As restored from a file, past the interval.
    optimizer.step_counter.assign(50)
    apply([good])
    assert float(optimizer.loss_scale) == 16.0
