"""Repairs under JAX DataParallel over two host devices; prints "done"."""

import jax
import keras
import numpy as np
from tuned import BIG, GOOD, ROWS, build, demoted
from tuner_models import CURE

import keras_mixprec as kmp


def fit(model, first, second, *callbacks):
    """Trains on batches of which each device gets one number."""
    pairs = np.array([first, second], "float32").T
    x = np.repeat(pairs.reshape(-1), ROWS)[:, None]
    model.fit(
        x,
        np.zeros_like(x),
        batch_size=2 * ROWS,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
    )


def fault_on_the_second_device_at_first():
    model, tuner = build(1.0), kmp.PrecisionTuner(verbose=0)
    fit(model, [GOOD] * 6, [BIG] * 6, tuner)
    assert demoted(model) == CURE, demoted(model)
    assert [e["step"] for e in tuner.history] == [0]
    assert int(model.optimizer.iterations) == 6
    check_spread(model)


def fault_on_the_second_device_later():
    model, tuner = build(1.0), kmp.PrecisionTuner(verbose=0)
    fit(model, [GOOD] * 40, [GOOD] * 20 + [BIG] * 20, tuner)
    assert demoted(model) == CURE, demoted(model)
    (step,) = [e["step"] for e in tuner.history]
    assert 20 < step <= 32, step
    assert int(model.optimizer.iterations) == 40 - (step - 20)
    check_spread(model)


def a_healthy_run_is_the_same_run():
    plain, tuned = build(1.0), build(1.0)
    values = np.linspace(1.0, 2.0, 60)
    fit(plain, values, values[::-1])
    tuner = kmp.PrecisionTuner(verbose=0)
    fit(tuned, values, values[::-1], tuner)
    assert tuner.history == []
    for ours, theirs in zip(tuned.weights, plain.weights, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-6)
    check_spread(tuned)


def check_spread(model):
    for variable in [*model.weights, *model.optimizer.variables]:
        shards = [np.asarray(s.data) for s in variable.value.addressable_shards]
        assert len(shards) == 2, variable.path
        np.testing.assert_array_equal(*shards)


if __name__ == "__main__":
    assert len(jax.devices()) == 2
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    fault_on_the_second_device_at_first()
    fault_on_the_second_device_later()
    a_healthy_run_is_the_same_run()
    print("done")
