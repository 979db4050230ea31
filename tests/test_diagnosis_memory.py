"""A diagnosis that runs out of memory blames nobody."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_mixprec import (
    LossScaleOptimizer,
    MixPrecMonitor,
    PrecisionTuner,
    apply_policy,
    diagnose,
    minimize_float32,
)

BACKEND = keras.backend.backend()


def of_the_backend():
    if BACKEND == "torch":
        import torch

        return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.errors.ResourceExhaustedError(
            None, None, "OOM when allocating tensor with shape[9,9]"
        )
    import jax

    return jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")


def exhaust(x, dtype):
    """Raises as a device does that has no room for what a dtype needs."""
    if keras.backend.standardize_dtype(x.dtype) == dtype:
        raise of_the_backend()
    return x * 1.0


class Large(keras.layers.Layer):
    dtype_without_room = None

    def call(self, x):
        return exhaust(x, self.dtype_without_room)


class OwnLoss(keras.Model):
    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return ops.mean(ops.cast(exhaust(y_pred, "float16"), "float32"))


def model_of(where, dtype="float16"):
    inputs = keras.Input((4,))
    large = Large(name="large")
    h = large(inputs)
    built = OwnLoss if where == "loss" else keras.Model
    model = built(inputs, keras.layers.Dense(1)(h))
    apply_policy(model, "mixed_float16", rules=[])
    large.dtype_without_room = dtype if where == "layer" else None
    model.compile(LossScaleOptimizer("adam"), loss="mse", jit_compile=False)
    return model


X, Y = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")


@pytest.mark.parametrize("where", ["layer", "loss"])
def test_no_layer_is_blamed_for_a_lack_of_memory(where):
    with pytest.raises(MemoryError, match="fewer samples"):
        diagnose(model_of(where), X, Y)


def test_a_prediction_that_runs_out_of_memory_blames_no_layer():
    with pytest.raises(MemoryError, match="fewer samples"):
        diagnose(model_of("layer"), X)


def test_a_search_does_not_count_it_as_a_wrong_result():
    with pytest.raises(MemoryError, match="fewer samples"):
        minimize_float32(model_of("layer"), X, Y, verbose=0)


def test_training_goes_on_without_the_diagnosis(tmp_path):
    # There is room for float16, and none for the float32 it is compared with.
    model = model_of("layer", "float32")
    monitor = MixPrecMonitor(tmp_path, verbose=0)
    callbacks = [monitor, PrecisionTuner(verbose=0)]
    with pytest.warns(UserWarning, match="ran out of memory"):
        model.fit(X, Y, batch_size=1, verbose=0, callbacks=callbacks)
    assert monitor.verdicts == []
    assert model.optimizer.iterations > 4
