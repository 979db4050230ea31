"""The logged loss scale, against the optimizer's after every single step."""

import keras
import numpy as np
import pytest
from monitor_models import (
    BACKEND,
    BAD,
    EveryStep,
    assert_logged,
    each_jit,
    fit,
    good,
    monitor,
    not_torch,
    one_weight,
    scalars,
    told,
)

import keras_mixprec as kmp
from keras_mixprec.loss_scaling.presets import PRESETS

JIT = BACKEND == "jax"
STEPS = 400
# One by one, in a burst, and more in a row than are kept in full.
OVERFLOWS = [60, 61, 62, *range(130, 171), 207, 301, 303, 305]
VALUES = [BAD if i in OVERFLOWS else 1 / 64 for i in range(STEPS)]
# So that it grows as well.
QUICK = {"growth_interval": 7}
RULES = {
    **{n: kmp.DynamicLossScale.preset(n, **QUICK) for n in PRESETS},
    "keras' own": None,
    "hysteresis": kmp.DynamicLossScale(hysteresis=3, **QUICK),
    "refilled": kmp.DynamicLossScale.preset(
        "deepspeed", hysteresis_refill="good_step", **QUICK
    ),
    "fractions": kmp.DynamicLossScale(2.0**10, 1.7, 0.3, **QUICK),
    "fixed": 1024.0,
    "table": {0: 1024.0, 99: 512.0, 100: 256.0, 250: 2048.0},
    "schedule": keras.optimizers.schedules.ExponentialDecay(2.0**15, 100, 0.5),
}


def wrapped(rule):
    def wrap(inner):
        if rule is None:
            return keras.optimizers.LossScaleOptimizer(
                inner, dynamic_growth_steps=7
            )
        return kmp.LossScaleOptimizer(inner, loss_scale=rule)

    return wrap


@pytest.mark.parametrize("name", RULES)
def test_no_step_is_wrong(name, tmp_path):
    model, seen = one_weight(wrapped(RULES[name]), JIT), EveryStep()
    fit(model, VALUES, [monitor(tmp_path), seen], epochs=2)
    assert len(seen.scales) == STEPS + 1
    assert_logged(tmp_path, seen.scales)
    assert told(tmp_path, "loss_scale_not_known") == []


@not_torch
@each_jit
def test_steps_that_are_taken_by_eights(jit, tmp_path):
    rule, seen = kmp.DynamicLossScale.preset("keras", **QUICK), EveryStep()
    fit(one_weight(wrapped(rule), jit), VALUES, [seen])
    model = one_weight(wrapped(rule), jit, steps_per_execution=8)
    fit(model, VALUES, [monitor(tmp_path)])
    assert_logged(tmp_path, seen.scales)


def test_many_fits_one_after_another(tmp_path):
    model = one_weight(wrapped(RULES["torch"]), JIT)
    scales = []
    for start in range(0, STEPS, 50):
        seen = EveryStep()
        watcher = monitor(tmp_path)
        fit(model, VALUES[start : start + 50], [watcher, seen])
        scales = [*scales[:-1], *seen.scales]
    assert len(scales) == STEPS + 1
    assert_logged(tmp_path, scales)
    assert told(tmp_path, "loss_scale_not_known") == []


def test_another_model_into_the_same_folder(tmp_path):
    for scale in 2.0**4, 2.0**10:
        model = one_weight(wrapped(scale), JIT)
        fit(model, good(60), [monitor(tmp_path)])
    # Where one ends the other begins; a curve has one point there.
    points = scalars(tmp_path, "loss_scale")
    assert points == {0: 16, 50: 16, 60: 16, 61: 1024, 110: 1024, 120: 1024}


class Set(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if batch == 70:
            self.model.optimizer.dynamic_scale.assign(2.0**5)


def test_a_scale_set_by_hand_is_not_guessed(tmp_path):
    model = one_weight(wrapped(2.0**10), JIT)
    fit(model, good(120), [monitor(tmp_path), Set()])
    (event,) = told(tmp_path, "loss_scale_not_known")
    assert (event["first_step"], event["last_step"]) == (51, 100)
    points = scalars(tmp_path, "loss_scale")
    assert points[50] == 2.0**10
    assert points[100] == points[120] == 2.0**5


def test_a_predicted_first_scale_holds_from_the_first_step(tmp_path):
    rule, seen = kmp.DynamicLossScale("auto"), EveryStep()
    model = one_weight(wrapped(rule), JIT)
    model.optimizer.learning_rate = 1e-6  # What is never moved, needs none.
    x = np.full((240, 1), 64.0, "float32")
    callbacks = [monitor(tmp_path), seen]
    model.fit(x, 0 * x, batch_size=4, verbose=0, callbacks=callbacks)
    assert seen.scales[1] < 2.0**15
    points = scalars(tmp_path, "loss_scale")
    assert points[1] == points[50] == seen.scales[1]
    assert told(tmp_path, "loss_scale_not_known") == []
