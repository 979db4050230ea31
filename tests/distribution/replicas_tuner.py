"""Repairs on two devices of one process; prints "done"."""

import tempfile

import keras
import numpy as np
from replicas import IS_TENSORFLOW, fit, in_pairs, scope, value
from tuned import BIG, GOOD, ROWS, chain, demoted
from tuner_models import CURE

import keras_mixprec as kmp


def build(rate=0.0):
    with scope():
        return chain(not IS_TENSORFLOW, rate=rate)


def keeping_monitor():
    return kmp.MixPrecMonitor(
        tempfile.mkdtemp(), keep_failing_batches=1, verbose=0
    )


def fault_on_the_second_device_at_first():
    model, tuner = build(), kmp.PrecisionTuner(verbose=0)
    fit(model, *in_pairs([GOOD] * 6, [BIG] * 6), tuner)
    assert demoted(model) == CURE, demoted(model)
    assert [e["step"] for e in tuner.history] == [0]
    assert value(model.optimizer.iterations) == 6
    return model


def fault_on_the_second_device_later():
    model, tuner = build(), kmp.PrecisionTuner(verbose=0)
    callbacks = [keeping_monitor(), tuner][not IS_TENSORFLOW :]
    second = [GOOD] * 20 + [BIG] * 20
    fit(model, *in_pairs([GOOD] * 40, second), *callbacks)
    assert demoted(model) == CURE, demoted(model)
    (step,) = [e["step"] for e in tuner.history]
    assert 20 < step <= 32, step
    assert value(model.optimizer.iterations) == 40 - (step - 20)
    if IS_TENSORFLOW:
        x, _, _ = callbacks[0].failing_batches[0].batch
        np.testing.assert_array_equal(x[:, 0], [GOOD] * ROWS + [BIG] * ROWS)
    return model


def diagnosis_on_demand():
    model = build()
    x = np.full((4, 1), BIG, "float32")
    for _ in range(2):
        first, *_ = kmp.diagnose(model, x, x * 0)
        assert (first.kind, first.layer) == ("forward_overflow", "big"), first
        fit(model, *in_pairs([GOOD], [GOOD]))


def a_healthy_run_is_the_same_run():
    values = np.linspace(1.0, 2.0, 60)
    tuner = kmp.PrecisionTuner(verbose=0)
    runs = []
    for callbacks in ([], [tuner]):
        model = build(2.0**-20)
        history = fit(model, *in_pairs(values, values[::-1]), *callbacks)
        variables = [*model.weights, *model.optimizer.variables]
        runs.append((history, [value(v) for v in variables]))
    assert tuner.history == []
    (expected, plain), (history, tuned) = runs
    assert history == expected
    for ours, theirs in zip(tuned, plain, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def the_second_device_may_run_out_first():
    model = build()
    x = np.full((9 * ROWS, 1), GOOD, "float32")
    fit(model, x, x, keeping_monitor(), kmp.PrecisionTuner(verbose=0))
    assert value(model.optimizer.iterations) == 5


if __name__ == "__main__":
    keras.config.set_dtype_policy("mixed_float16")
    for model in (
        fault_on_the_second_device_at_first(),
        fault_on_the_second_device_later(),
    ):
        for variable in [*model.weights, *model.optimizer.variables]:
            value(variable)
    a_healthy_run_is_the_same_run()
    if IS_TENSORFLOW:
        diagnosis_on_demand()
        the_second_device_may_run_out_first()
    print("done")
