"""Models and data for the tests of `compare_precisions`."""

import keras
import numpy as np

import keras_mixprec as kmp

BATCH, ROWS, WIDTH = 8, 32, 6


def arrays():
    """Four batches of a regression."""
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, WIDTH)).astype("float32")
    return x, np.tanh(x @ random.normal(size=(WIDTH, 1))).astype("float32")


def dense():
    """The model of most tests; it drops, so that it draws numbers."""
    model = keras.Sequential(
        [
            keras.Input((WIDTH,)),
            keras.layers.Dense(8, "relu"),
            keras.layers.Dropout(0.25),
            keras.layers.Dense(1),
        ]
    )
    return compiled(model)


def compiled(model, **arguments):
    model.compile(
        keras.optimizers.Adam(0.01), "mse", metrics=["mae"], **arguments
    )
    return model


def unbuilt():
    layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)]
    return compiled(keras.Sequential(layers))


def two_inputs():
    inputs = {
        "a": keras.Input((4,), name="a"),
        "b": keras.Input((2,), name="b"),
    }
    x = keras.layers.Concatenate()(list(inputs.values()))
    return compiled(keras.Model(inputs, keras.layers.Dense(1)(x)))


def two_arrays():
    x, y = arrays()
    return {"a": x[:, :4], "b": x[:, 4:]}, y


class OwnStep(keras.Model):
    """Doubles the loss, and has a custom `train_step` that calls Keras'."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, *args, **kwargs):
        return 2.0 * super().compute_loss(*args, **kwargs)

    def train_step(self, *args):
        return super().train_step(*args)


def own_step():
    return compiled(OwnStep())


def skips():
    model = dense()
    model.compile(kmp.LossScaleOptimizer("adam", 2.0**100), "mse")
    return model


def sets_the_policy():
    kmp.set_global_policy("float32")
    return dense()
