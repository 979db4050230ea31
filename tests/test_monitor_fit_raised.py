"""A run that an exception ends says so, also in float32."""

import keras
import numpy as np
import pytest

import keras_mixprec as kmp

JIT = keras.backend.backend() == "jax"
X = np.ones((32, 4), "float32")


class Raising(keras.callbacks.Callback):
    def __init__(self, error, batch):
        super().__init__()
        self.error, self.batch = error, batch

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.batch:
            raise self.error


class InCall(keras.layers.Layer):
    """Raises when it is called on numbers, in `fit` for the first time."""

    def call(self, x):
        if getattr(getattr(x, "device", None), "type", "") == "meta":
            return x  # Where torch works shapes out.
        raise OSError("no such lookup table")

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)


def model_with(*layers):
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile("sgd", "mse", jit_compile=JIT)
    return model


def fit(model, path, error, *callbacks):
    monitor = kmp.MixPrecMonitor(path)
    with pytest.raises(error):
        model.fit(X, X[:, :1], 8, verbose=0, callbacks=[monitor, *callbacks])
    return monitor


def told(path):
    report = kmp.load_report(path)
    [run] = report.to_dict().values()
    return run, " ".join(str(report).split())


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
@pytest.mark.parametrize("batch", [0, 2])
def test_the_exception_stands_everywhere(tmp_path, capsys, policy, batch):
    keras.config.set_dtype_policy(policy)
    model = model_with(keras.layers.Dense(1))
    raising = Raising(OSError("disk is full"), batch)
    monitor = fit(model, tmp_path, OSError, raising)
    said = f"ended in step {batch + 1}: OSError: disk is full"
    run, text = told(tmp_path)
    assert run["headline"]["state"] == "failing"
    finding = run["events"][run["finding"]["event"]]
    assert (finding["kind"], finding["level"]) == ("fit_raised", "bad")
    for place in (text, capsys.readouterr().out, str(monitor.summary)):
        assert said in " ".join(place.split())
        assert "no findings" not in place
    assert said in " ".join(str(monitor.report).split())


@pytest.mark.skipif(JIT, reason="JAX calls it before `fit` has begun.")
def test_a_step_in_float32_that_raises(tmp_path):
    model = model_with(keras.layers.Dense(1), InCall())
    fit(model, tmp_path, (OSError, RuntimeError))
    run, text = told(tmp_path)
    assert run["headline"]["state"] == "failing"
    assert "step 1" in text.lower()
    assert "no such lookup table" in text


def test_what_was_interrupted_does_not_fail(tmp_path):
    model = model_with(keras.layers.Dense(1))
    fit(model, tmp_path, KeyboardInterrupt, Raising(KeyboardInterrupt(), 2))
    run, text = told(tmp_path)
    assert run["headline"]["state"] == "healthy"
    assert "2 steps, no findings; interrupted in step 3;" in text


def test_a_fit_after_it_is_judged_by_itself(tmp_path):
    model = model_with(keras.layers.Dense(1))
    fit(model, tmp_path, OSError, Raising(OSError("disk is full"), 0))
    monitor = kmp.MixPrecMonitor(tmp_path, verbose=0)
    model.fit(X, X[:, :1], verbose=0, callbacks=[monitor])
    run, _ = told(tmp_path)
    assert run["headline"]["state"] == "healthy"
