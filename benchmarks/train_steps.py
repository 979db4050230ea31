"""Runs train steps of a compiled model without the rest of `fit`."""

import itertools

import keras
import numpy as np

from keras_mixprec.backend import active


def stepper(model: keras.Model, x: np.ndarray, y: np.ndarray):
    """Trains two steps on one batch, and returns a function that goes on.

    Returns:
        A function `run(steps)`. It ends when the device has finished the
        last step.
    """
    name = keras.backend.backend()
    return {"tensorflow": _tensorflow, "jax": _jax, "torch": _torch}[name](
        model, x, y
    )


def _tensorflow(model, x, y):
    import tensorflow as tf

    # Both loops use the same dataset, so that the step is compiled only once.
    batches = tf.data.Dataset.from_tensors((x, y)).cache().repeat()
    model.fit(batches, steps_per_epoch=2, verbose=0)
    batches = iter(batches)

    def run(steps):
        for _ in range(steps):
            logs = model.train_function(batches)
        active.runtime().wait(logs)

    return run


def _jax(model, x, y):
    import jax.numpy as jnp

    model.fit(x, y, batch_size=len(x), epochs=2, verbose=0)
    batches = itertools.repeat((jnp.asarray(x), jnp.asarray(y)))
    kinds = ("trainable", "non_trainable", "optimizer", "metrics")
    state = model._get_jax_state(**{f"{k}_variables": True for k in kinds})

    def run(steps):
        # JAX reuses the memory of the old state for the new state, so the old
        # state cannot be read again.
        nonlocal state
        for _ in range(steps):
            _, state = model.train_function(state, batches)
        active.runtime().wait(state)

    return run


def _torch(model, x, y):
    model.fit(x, y, batch_size=len(x), epochs=2, verbose=0)
    batch = [tuple(keras.ops.convert_to_tensor(a) for a in (x, y))]

    def run(steps):
        for _ in range(steps):
            logs = model.train_function(batch)
        active.runtime().wait(logs)

    return run
