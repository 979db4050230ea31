"""The optimizer on two devices of one process; prints "done"."""

import functools

import keras
import numpy as np
from replicas import IS_TENSORFLOW, fit, scope, value

from keras_mixprec import LossScaleOptimizer
from keras_mixprec.numerics.range_reading import read_ranges

SCALE = 2.0**10
X = np.linspace(-1, 1, 8, dtype="float32")[:, None]
# The rows of a batch of 8 that each device sees.
SHARDS = {"first": slice(0, 4), "second": slice(4, 8), "both": slice(0, 8)}
sgd, adam = keras.optimizers.SGD, keras.optimizers.Adam


def build(inner):
    with scope():
        model = keras.Sequential(
            [
                keras.Input((1,)),
                keras.layers.Dense(2, dtype="mixed_float16"),
                keras.layers.Dense(1, dtype="float32"),
            ]
        )
        # The optimizer is made here because Keras stores its strategy.
        optimizer = LossScaleOptimizer(inner(), initial_scale=SCALE)
        model.compile(optimizer, "mse", jit_compile=not IS_TENSORFLOW)
        optimizer.build(model.trainable_variables)
    return model, optimizer


def spoiled(shard):
    y = X.copy()
    y[SHARDS[shard]] = np.nan
    return y


def a_bad_shard_skips_the_step(shard, inner):
    model, optimizer = build(inner)
    fit(model, X, X)
    assert np.isfinite(list(optimizer.gradient_norms().values())).all()
    before = [value(w) for w in model.weights]
    fit(model, X, spoiled(shard))
    for weight, old in zip(model.weights, before, strict=True):
        assert value(weight).tobytes() == old.tobytes()
    check_told(model, optimizer)
    fit(model, X, X)
    assert value(optimizer.iterations) == 2
    after = [value(w) for w in model.weights]
    assert np.isfinite(np.concatenate(after, axis=None)).all()
    assert any(map(np.any, map(np.not_equal, before, after)))


def check_told(model, optimizer):
    """Checks the counters after two steps; the last one was skipped."""
    assert float(optimizer.loss_scale) == SCALE / 2
    assert optimizer.step_counts() == (2, 1, 1)
    assert value(optimizer.iterations) == 1
    assert set(optimizer.overflow_counts().values()) == {1}
    (step,) = optimizer.nonfinite_steps()
    assert (step.step, step.scale) == (2, SCALE)
    assert [*step.kinds.values()] == [["nan"]] * len(model.trainable_variables)
    assert optimizer.nonfinite_counts() == {"inf": 0, "-inf": 0, "nan": 1}
    history = optimizer.history
    for variable in optimizer.dynamic_scale, history.counts, *model.weights:
        assert np.isfinite(value(variable)).all()


def ranges_are_those_of_both():
    x = np.arange(1, 9, dtype="float32")[:, None]
    keras.config.set_dtype_policy("mixed_float16")
    with scope():
        dense = keras.layers.Dense(1, None, False, "ones", name="dense")
        model = keras.Sequential([keras.Input((1,)), dense])
        optimizer = LossScaleOptimizer(sgd(1e-3), 8.0)
        model.compile(optimizer, "mse", jit_compile=not IS_TENSORFLOW)
    fit(model, x, x * 0)
    before = value(dense.kernel)
    data = [keras.ops.convert_to_tensor(each) for each in (x, x * 0)]
    found = read_ranges(model, tuple(data))
    assert found.failures == {}, found.failures
    np.testing.assert_array_equal(value(dense.kernel), before)
    (reading,) = found.readings
    activation = reading.parts["activation"]
    assert activation.size == 8, activation.size
    assert 7.5 < activation.largest < 8
    assert reading.lost_updates == (None if IS_TENSORFLOW else 0.0)


def custom_loop(shard):
    import tensorflow as tf
    from replicas import STRATEGY

    model, optimizer = build(adam)

    def step(x, y):
        with tf.GradientTape() as tape:
            error = tf.reduce_sum((model(x) - y) ** 2) / 8.0
            loss = optimizer.scale_loss(error)
        weights = model.trainable_variables
        gradients = tape.gradient(loss, [w.value for w in weights])
        optimizer.apply(gradients, weights)

    @tf.function
    def run(x, y):
        STRATEGY.run(step, args=(x, y))

    def sharded(y):
        data = tf.data.Dataset.from_tensor_slices((X, y)).batch(8)
        return next(iter(STRATEGY.experimental_distribute_dataset(data)))

    run(*sharded(X))
    run(*sharded(spoiled(shard)))
    check_told(model, optimizer)
    run(*sharded(X))
    assert value(optimizer.iterations) == 2


if __name__ == "__main__":
    for case in SHARDS:
        a_bad_shard_skips_the_step(case, adam)
    a_bad_shard_skips_the_step("second", sgd)
    everything = {"weight_decay": 0.1, "clipnorm": 1.0, "use_ema": True}
    a_bad_shard_skips_the_step("second", functools.partial(adam, **everything))
    ranges_are_those_of_both()
    if IS_TENSORFLOW:
        custom_loop("second")
    print("done")
