"""Steps that raise and so end `fit`, as a loss on torch that refuses NaN."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from lint_cases import Deferring
from monitor_models import overview
from tuner_models import tuner

import keras_mixprec as kmp

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(96, 16)).astype("float32")
Y = RANDOM.integers(0, 2, (96, 1))
# A batch of zeros makes the norm 0, because 1e-8 is 0 in float16.
X[40:44] = 0
FIT = {"batch_size": 32, "shuffle": False, "verbose": 0}
refused = pytest.raises(RuntimeError, match="between 0 and")


class Norm(layers.Layer):
    def call(self, x):
        squares = ops.mean(x * x, axis=-1, keepdims=True)
        return x / ops.sqrt(squares + 1e-8)


def compiled(inputs, x, cls=keras.Model):
    outputs = layers.Dense(1, "sigmoid", name="out")(x)
    model = cls(inputs, outputs)
    rules = [kmp.PrecisionRule("out")]
    kmp.apply_policy(model, "mixed_float16", rules=rules)
    optimizer = kmp.LossScaleOptimizer("sgd")
    model.compile(optimizer, "binary_crossentropy", jit_compile=False)
    return model


def model_with(layer, cls=keras.Model):
    inputs = keras.Input((16,))
    first = layers.Dense(16, use_bias=False, name="first")(inputs)
    return compiled(inputs, layer(first), cls)


def monitor(tmp_path):
    # A reading before would have diagnosed as well.
    return kmp.MixPrecMonitor(tmp_path, verbose=0, update_freq=100)


def repairing(**arguments):
    return tuner(bfloat16=False, **arguments)


@pytest.mark.parametrize("cls", [keras.Model, Deferring])
def test_the_layer_is_named_below_the_exception(cls, tmp_path):
    model = model_with(Norm(name="norm"), cls)
    # A step of the user's own is not taken again.
    callbacks = [repairing()] * (cls is Deferring)
    for folder in "ab":  # It can be trained again afterwards.
        with refused as caught:
            watching = [monitor(tmp_path / folder), *callbacks]
            model.fit(X, Y, callbacks=watching, **FIT)
        [note] = caught.value.__notes__
        assert "PrecisionRule('norm')" in note
        said = overview(tmp_path / folder)["headline"]
        assert said["state"] == "failing"
        assert "norm" in said["text"].partition(";")[0]
    said = overview(tmp_path / "a")["headline"]["text"]
    assert "raised RuntimeError" in said


def test_the_tuner_repairs_it_and_the_step_is_taken_again(tmp_path):
    model, callback = model_with(Norm(name="norm")), repairing()
    callbacks = [monitor(tmp_path), callback]
    history = model.fit(X, Y, epochs=4, callbacks=callbacks, **FIT).history
    assert np.isfinite(history["loss"]).all()
    assert model.optimizer.attempted_steps == 12
    assert callback.plan["norm"] == "float32"
    [change] = [e for e in callback.history if e["kind"] == "demote"]
    assert change["step"] == 1
    said = overview(tmp_path)["headline"]
    assert said["state"] == "repaired"
    assert "raised RuntimeError" in said["text"]


def test_an_update_is_not_applied_twice(tmp_path):
    """A metric raises once the optimizer has updated the weights."""

    class Metric(keras.metrics.MeanSquaredError):
        def update_state(self, y_true, y_pred, sample_weight=None):
            if y_pred.device.type != "meta" and not y_pred.isfinite().all():
                raise ValueError("not finite")
            return super().update_state(y_true, y_pred, sample_weight)

    model = model_with(Norm(name="norm"))
    model.compile(model.optimizer, "mse", metrics=[Metric()])
    with pytest.raises(ValueError, match="not finite"):
        model.fit(X, Y, callbacks=[repairing()], **FIT)
    assert model.optimizer.attempted_steps == 2


def classifier():
    inputs = keras.Input((16,))
    return compiled(inputs, layers.Dense(8, "relu")(inputs))


@pytest.mark.parametrize("tuned", [False, True], ids=["alone", "tuned"])
@pytest.mark.parametrize(("part", "row"), [("x", 3), ("y", 90)])
def test_bad_data_is_named_where_the_loss_refuses_it(
    tmp_path, part, row, tuned
):
    data = {"x": X.copy(), "y": Y.astype("float32")}
    data[part][row] = np.nan
    watcher, callback = monitor(tmp_path), tuner()
    callbacks = [watcher, callback][: 1 + tuned]
    with refused as caught:
        classifier().fit(data["x"], data["y"], callbacks=callbacks, **FIT)
    [verdict] = watcher.verdicts
    assert (verdict.kind, verdict.step) == ("bad_data", row // 32 + 1)
    assert verdict.numbers[f"samples_of_{part}"] == [row]
    assert f"isfinite({part})" in verdict.advice
    [note] = caught.value.__notes__
    assert str(verdict) in note
    assert callback.history == []
