"""JAX DataParallel over two host devices; prints "done" if all checks held."""

import itertools

import jax
import keras
import numpy as np

from keras_mixprec import LossScaleOptimizer

SCALE = 2.0**10
X = np.linspace(-1, 1, 8, dtype="float32")[:, None]
SHARDS = {"first": slice(0, 4), "second": slice(4, 8), "both": slice(0, 8)}


def check_equal_and_finite(variables):
    for variable in variables:
        shards = [np.asarray(s.data) for s in variable.value.addressable_shards]
        assert len(shards) == 2
        assert shards[0].tobytes() == shards[1].tobytes(), variable.path
        assert np.isfinite(shards[0]).all(), variable.path


def build(inner):
    model = keras.Sequential(
        [
            keras.Input((1,)),
            keras.layers.Dense(2, dtype="mixed_float16"),
            keras.layers.Dense(1, dtype="float32"),
        ]
    )
    optimizer = LossScaleOptimizer(inner(), initial_scale=SCALE)
    model.compile(optimizer, loss="mse")
    return model, optimizer


def fit(shard, inner):
    model, optimizer = build(inner)
    model.fit(X, X, batch_size=8, verbose=0)
    before = [w.copy() for w in model.get_weights()]
    bad = X.copy()
    bad[SHARDS[shard]] = np.nan
    model.fit(X, bad, batch_size=8, verbose=0)
    for old, new in zip(before, model.get_weights(), strict=True):
        assert old.tobytes() == new.tobytes()
    assert float(optimizer.loss_scale) == SCALE / 2
    assert (optimizer.attempted_steps, optimizer.skipped_steps) == (2, 1)
    assert int(optimizer.iterations) == 1
    assert set(optimizer.overflow_counts().values()) == {1}
    check_equal_and_finite(model.weights)
    check_equal_and_finite([optimizer.dynamic_scale, optimizer.history.counts])
    model.fit(X, X, batch_size=8, verbose=0)
    assert int(optimizer.iterations) == 2
    assert np.isfinite(list(optimizer.gradient_norms().values())).all()


if __name__ == "__main__":
    assert len(jax.devices()) == 2
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    inners = keras.optimizers.SGD, keras.optimizers.Adam
    for case, kind in itertools.product(SHARDS, inners):
        fit(case, kind)
    print("done")
