"""MirroredStrategy on two logical CPUs; run in a process of its own.

TensorFlow fixes its logical devices when it starts, so the test runner, which
has started it, cannot have two. Prints "done" if every check held.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_mixprec import LossScaleOptimizer

SCALE = 2.0**10
X = np.linspace(-1, 1, 8, dtype="float32")[:, None]
# The rows of a batch of 8 that each replica sees.
SHARDS = {"first": slice(0, 4), "second": slice(4, 8), "both": slice(0, 8)}


def replicas(variable):
    results = STRATEGY.experimental_local_results(variable.value)
    assert len(results) == 2
    return [result.numpy() for result in results]


def check_equal_and_finite(variables):
    for variable in variables:
        first, second = replicas(variable)
        assert first.tobytes() == second.tobytes(), variable.path
        assert np.isfinite(first).all(), variable.path


def build(inner):
    with STRATEGY.scope():
        model = keras.Sequential(
            [
                keras.Input((1,)),
                keras.layers.Dense(2, dtype="mixed_float16"),
                keras.layers.Dense(1, dtype="float32"),
            ]
        )
        optimizer = LossScaleOptimizer(inner(), initial_scale=SCALE)
        model.compile(optimizer, loss="mse", jit_compile=False)
        optimizer.build(model.trainable_variables)
    return model, optimizer


def spoiled(shard):
    y = X.copy()
    y[SHARDS[shard]] = np.nan
    return y


def fit(shard, inner):
    model, optimizer = build(inner)
    model.fit(X, X, batch_size=8, verbose=0)
    before = [w.copy() for w in model.get_weights()]
    assert np.isfinite(list(optimizer.gradient_norms().values())).all()
    model.fit(X, spoiled(shard), batch_size=8, verbose=0)
    for old, new in zip(before, model.get_weights(), strict=True):
        assert old.tobytes() == new.tobytes()
    check_told(model, optimizer, attempted=2)
    model.fit(X, X, batch_size=8, verbose=0)
    assert int(replicas(optimizer.iterations)[0]) == 2
    changed = zip(before, model.get_weights(), strict=True)
    assert any(not np.array_equal(old, new) for old, new in changed)
    check_equal_and_finite(model.weights)


def check_told(model, optimizer, attempted):
    assert float(optimizer.loss_scale) == SCALE / 2
    assert optimizer.attempted_steps == attempted
    assert int(replicas(optimizer.iterations)[0]) == attempted - 1
    assert (optimizer.skipped_steps, optimizer.last_step_skipped) == (1, True)
    assert set(optimizer.overflow_counts().values()) == {1}
    (step,) = optimizer.nonfinite_steps()
    assert (step.step, step.scale) == (attempted, SCALE)
    assert [*step.kinds.values()] == [["nan"]] * len(model.trainable_variables)
    assert optimizer.nonfinite_counts() == {"inf": 0, "-inf": 0, "nan": 1}
    check_equal_and_finite(model.weights)
    check_equal_and_finite([optimizer.dynamic_scale, optimizer.history.counts])


def custom_loop(shard, inner):
    model, optimizer = build(inner)

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
    check_told(model, optimizer, attempted=2)
    run(*sharded(X))
    assert int(replicas(optimizer.iterations)[0]) == 2


def norms_bound_those_of_one_device():
    model, optimizer = build(lambda: keras.optimizers.SGD(0.0))
    model.fit(X, X, batch_size=8, verbose=0)
    x = tf.constant(X)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - x) ** 2)
    weights = model.trainable_variables
    gradients = tape.gradient(loss, [replica_value(w) for w in weights])
    told = list(optimizer.gradient_norms().values())
    for norm, gradient in zip(told, gradients, strict=True):
        assert norm >= np.linalg.norm(gradient.numpy()) * 0.99


def replica_value(weight):
    return STRATEGY.experimental_local_results(weight.value)[0]


def outside_of_a_replica():
    model, optimizer = build(keras.optimizers.SGD)
    gradients = [tf.ones(w.shape) for w in model.trainable_variables]
    with (
        STRATEGY.scope(),
        pytest.raises(ValueError, match="in a replica context"),
    ):
        optimizer.apply(gradients, model.trainable_variables)


def unscaled_in_one_run_and_applied_in_the_next(clip):
    with STRATEGY.scope():
        weight = keras.Variable(np.ones(3, "float32"))
        sgd = keras.optimizers.SGD(0.125)
        optimizer = LossScaleOptimizer(sgd, initial_scale=SCALE)
        optimizer.build([weight])
    gradient = STRATEGY.run(lambda: optimizer.unscale([tf.fill([3], SCALE)])[0])
    STRATEGY.run(lambda g: optimizer.apply([clip(g)]), args=(gradient,))
    for values in replicas(weight):
        np.testing.assert_array_equal(values, np.full(3, 0.75))


if __name__ == "__main__":
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * 2,
    )
    STRATEGY = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    adam = keras.optimizers.Adam
    for case in SHARDS:
        fit(case, adam)
    custom_loop("second", adam)
    fit("second", lambda: adam(weight_decay=0.1, clipnorm=1.0, use_ema=True))
    norms_bound_those_of_one_device()
    outside_of_a_replica()
    unscaled_in_one_run_and_applied_in_the_next(lambda g: g)
    unscaled_in_one_run_and_applied_in_the_next(lambda g: tf.minimum(g, 2.0))
    print("done")
