"""A diagnosis takes the batches that `fit` takes."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_mixprec import (
    LossScaleOptimizer,
    MixPrecMonitor,
    PrecisionTuner,
    diagnose,
)

BACKEND = keras.backend.backend()


class OwnLoss(keras.Model):
    """Subtracts in its own `compute_loss`, which mixes no dtypes in `fit`."""

    def __init__(self, prepare):
        super().__init__()
        self.prepare = prepare
        self.dense = keras.layers.Dense(1, name="dense")

    def call(self, x):
        return self.dense(self.prepare(x))

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return ops.mean(ops.square(y - ops.cast(y_pred, "float32")))


def compiled(model, loss="mse"):
    model.compile(
        LossScaleOptimizer(keras.optimizers.SGD(0.0), initial_scale=16.0),
        loss=loss,
        jit_compile=False,
    )
    return model


def own(prepare=lambda x: x):
    keras.config.set_dtype_policy("mixed_float16")
    return compiled(OwnLoss(prepare), None)


def kinds(model, *data):
    return [(v.kind, v.layer) for v in diagnose(model, *data)]


@pytest.mark.parametrize("dtype", ["float64", "float16"])
@pytest.mark.parametrize("tensors", [False, True])
def test_floats_have_the_dtype_that_fit_casts_them_to(dtype, tensors):
    x, y = np.ones((8, 4), dtype), np.ones((8, 1), dtype)
    if tensors:
        x, y = map(ops.convert_to_tensor, (x, y))
    assert kinds(own(), x, y) == []


@pytest.mark.parametrize("number", [0.5, np.float32(0.5), np.array(0.5)])
def test_a_number_may_stand_beside_arrays(number):
    model = own(lambda x: x["a"] * ops.cast(x["number"], x["a"].dtype))
    x, y = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")
    assert kinds(model, {"a": x, "number": number}, y) == []
    bad = x.copy()
    bad[3] = np.nan
    (verdict,) = diagnose(model, {"a": bad, "number": number}, y)
    assert verdict.kind == "bad_data"
    assert verdict.numbers["rows_of_x"] == [3]


@pytest.mark.skipif(BACKEND != "tensorflow", reason="a dataset of TensorFlow")
def test_fit_is_watched_with_a_number_beside_arrays(tmp_path, recwarn):
    import tensorflow as tf

    model = own(lambda x: x["a"] * ops.cast(x["number"], x["a"].dtype))
    x = {"a": np.ones((8, 4), "float32"), "number": np.float32(0.5)}
    batch = x, np.ones((8, 1), "float32")
    data = tf.data.Dataset.from_tensors(batch).repeat(40)
    callbacks = [MixPrecMonitor(tmp_path, verbose=0), PrecisionTuner(verbose=0)]
    model.fit(data, verbose=0, callbacks=callbacks)
    said = [str(w.message) for w in recwarn]
    assert not [text for text in said if "goes on without" in text]


def test_a_fault_is_found_beside_sparse_inputs():
    scipy_sparse = pytest.importorskip("scipy.sparse")
    keras.config.set_dtype_policy("mixed_float16")
    model = compiled(
        keras.Sequential(
            [
                keras.Input((4,), sparse=BACKEND == "tensorflow"),
                keras.layers.Dense(4, kernel_initializer="ones"),
                keras.layers.Lambda(lambda x: x * x * 1e-6, name="square"),
                keras.layers.Dense(1),
            ]
        )
    )
    x, y = np.full((8, 4), 200.0, "float32"), np.ones((8, 1), "float32")
    found = kinds(model, scipy_sparse.csr_matrix(x), y)
    assert ("forward_overflow", "square") in found
    if BACKEND == "tensorflow":
        import tensorflow as tf

        assert kinds(model, tf.sparse.from_dense(x), y) == found


def rounds_to_one_size(x):
    return ops.reshape(x, (96, 4))


def stateful():
    inputs = keras.Input(batch_shape=(96, 2, 2))
    h = keras.layers.LSTM(4, stateful=True)(inputs)
    return compiled(keras.Model(inputs, keras.layers.Dense(1)(h)))


@pytest.mark.parametrize(
    ("build", "shape"),
    [(stateful, (2, 2)), (lambda: own(rounds_to_one_size), (4,))],
    ids=["stateful", "reshape"],
)
def test_the_tuner_diagnoses_models_that_are_made_for_one_size(
    tmp_path, recwarn, build, shape
):
    keras.config.set_dtype_policy("mixed_float16")
    model, tuner = build(), PrecisionTuner(verbose=0)
    monitor = MixPrecMonitor(tmp_path, verbose=0)
    x = np.ones((96 * 10, *shape), "float32")
    y = np.ones((96 * 10, 1), "float32")
    callbacks = [monitor, tuner]
    model.fit(x, y, batch_size=96, verbose=0, callbacks=callbacks)
    said = [str(w.message) for w in recwarn if "diagnose" in str(w.message)]
    assert said == []


class Centred(keras.layers.Layer):
    """Squares of differences from the mean, which overflow."""

    in_place = False

    def call(self, x):
        mean = ops.mean(x, axis=-1, keepdims=True)
        if self.in_place:
            x -= mean
        else:
            x = x - mean
        return x * x


@pytest.mark.skipif(BACKEND != "torch", reason="its tensors can be changed")
@pytest.mark.parametrize("size", [1.0, 400.0])
def test_a_layer_may_change_its_input_in_place(size):
    found, x = [], np.random.default_rng(0).normal(size=(32, 8)) * size
    for Centred.in_place in (False, True):
        keras.utils.set_random_seed(0)
        keras.config.set_dtype_policy("mixed_float16")
        inputs = keras.Input((8,))
        h = keras.layers.Dense(8, name="first")(inputs)
        outputs = keras.layers.Dense(1, name="head")(Centred(name="c")(h))
        model = compiled(keras.Model(inputs, outputs))
        found.append(kinds(model, x, np.ones((32, 1))))
    assert found[0] == found[1]
    assert bool(found[0]) == (size > 1)


class Ratio(keras.layers.Layer):
    """Casts what it is given itself, once it is small."""

    def call(self, x):
        small = ops.cast(x * 1e-14, self.compute_dtype)
        return small / ops.sum(small, axis=-1, keepdims=True)


def test_no_cast_is_blamed_of_a_layer_that_casts_nothing():
    inputs = keras.Input((8,))
    ratio = Ratio(name="ratio", autocast=False, dtype="mixed_float16")
    head = keras.layers.Dense(1, dtype="float32")
    model = compiled(keras.Model(inputs, head(ratio(inputs))))
    found = kinds(model, np.full((8, 8), 1e5), np.ones((8, 1)))
    assert found == [("underflow", "ratio")]
