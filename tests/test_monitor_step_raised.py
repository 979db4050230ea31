"""Steps that raise, which ends `fit`: on torch a loss may refuse a NaN."""

import keras
import numpy as np
import pytest
import torch
from keras import layers, ops

import keras_mixprec as kmp

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(96, 16)).astype("float32")
Y = RANDOM.integers(0, 2, (96, 1))
# Nothing but zeros in the second batch, for which 1e-8 is 0 in float16.
X[40:44] = 0


class Norm(layers.Layer):
    def call(self, x):
        squares = ops.mean(x * x, axis=-1, keepdims=True)
        return x / ops.sqrt(squares + 1e-8)


class Refusing(layers.Layer):
    """Raises whatever the dtype, from its third call on."""

    error, calls = RuntimeError("only twice"), 0

    def call(self, x):
        self.calls += 1
        if self.calls > 2 and x.device.type != "meta":
            raise self.error
        return x


class OwnStep(keras.Model):
    """Has done who knows what when it raises."""

    def train_step(self, data):
        return super().train_step(data)


def model_with(layer, cls=keras.Model):
    inputs = keras.Input((16,))
    x = layers.Dense(16, use_bias=False, name="first")(inputs)
    outputs = layers.Dense(1, "sigmoid", name="out")(layer(x))
    return compiled(cls(inputs, outputs))


def compiled(model):
    rules = [kmp.PrecisionRule("out")]
    kmp.apply_policy(model, "mixed_float16", rules=rules)
    optimizer = kmp.LossScaleOptimizer("sgd")
    model.compile(optimizer, "binary_crossentropy", jit_compile=False)
    return model


FIT = {"batch_size": 32, "shuffle": False, "verbose": 0}


def headline(tmp_path):
    [read] = kmp.load_report(tmp_path).to_dict().values()
    return read["headline"]


def monitor(tmp_path):
    # A reading before would have diagnosed as well.
    return kmp.MixPrecMonitor(tmp_path, verbose=0, update_freq=100)


def run(layer, tmp_path, error=RuntimeError):
    """The exception that ended `fit`, and what the report says of the run."""
    model = model_with(layer)
    with pytest.raises(error) as caught:
        model.fit(X, Y, callbacks=[monitor(tmp_path)], **FIT)
    return caught.value, headline(tmp_path)


def test_the_layer_is_named_below_the_exception(tmp_path):
    error, said = run(Norm(name="norm"), tmp_path)
    [note] = error.__notes__
    assert "underflow in the forward pass of 'norm'" in note
    assert "float32: PrecisionRule('norm')" in note
    assert said["state"] == "failing"
    assert said["text"].startswith("norm underflowed")
    assert "; step 2 raised RuntimeError: all elements of" in said["text"]
    assert "1 step," in said["text"]


def test_the_tuner_repairs_it_and_the_step_is_taken_again(tmp_path):
    model = model_with(Norm(name="norm"))
    tuner = kmp.PrecisionTuner(verbose=0, bfloat16=False)
    callbacks = [monitor(tmp_path), tuner]
    history = model.fit(X, Y, epochs=4, callbacks=callbacks, **FIT).history
    assert np.isfinite(history["loss"]).all()
    assert model.optimizer.attempted_steps == 12
    assert tuner.plan["norm"] == "float32"
    [change] = [e for e in tuner.history if e["kind"] == "demote"]
    assert change["step"] == 1
    said = headline(tmp_path)
    assert said["state"] == "repaired"
    assert "taken again: step 2 raised RuntimeError" in said["text"]


def test_a_second_fault_does_not_wait_for_the_first():
    inputs = keras.Input((16,))
    norms = [
        Norm(name=name)(layers.Dense(16, use_bias=False)(half))
        for name, half in zip(
            ("left", "right"), ops.split(inputs, 2, axis=-1), strict=True
        )
    ]
    outputs = layers.Dense(1, "sigmoid", name="out")(layers.add(norms))
    model = compiled(keras.Model(inputs, outputs))
    x = RANDOM.normal(size=(96, 16)).astype("float32")
    x[40:44, :8] = x[70:74, 8:] = 0
    tuner = kmp.PrecisionTuner(verbose=0, bfloat16=False, cooldown=50)
    model.fit(x, Y, epochs=2, callbacks=[tuner], **FIT)
    changes = [e for e in tuner.history if e["kind"] == "demote"]
    assert [change["step"] for change in changes] == [1, 2]
    for change, name in zip(changes, ("left", "right"), strict=True):
        assert name in change["layers"]


def test_a_step_of_the_users_own_is_not_taken_again(tmp_path):
    model = model_with(Norm(name="norm"), OwnStep)
    tuner = kmp.PrecisionTuner(verbose=0, bfloat16=False)
    with pytest.raises(RuntimeError, match="between 0 and 1") as caught:
        model.fit(X, Y, callbacks=[monitor(tmp_path), tuner], **FIT)
    assert "norm" in caught.value.__notes__[0]
    assert headline(tmp_path)["state"] == "failing"


def test_an_update_is_not_applied_twice(tmp_path):
    """A metric raises once the optimizer has updated the weights."""

    class Metric(keras.metrics.MeanSquaredError):
        def update_state(self, y_true, y_pred, sample_weight=None):
            if y_pred.device.type != "meta" and not y_pred.isfinite().all():
                raise ValueError("not finite")
            return super().update_state(y_true, y_pred, sample_weight)

    model = model_with(Norm(name="norm"))
    model.compile(model.optimizer, "mse", metrics=[Metric()])
    tuner = kmp.PrecisionTuner(verbose=0, bfloat16=False)
    with pytest.raises(ValueError, match="not finite"):
        model.fit(X, Y, callbacks=[tuner], **FIT)
    assert model.optimizer.attempted_steps == 2


def test_what_raises_in_float32_too_is_passed_on_as_it_is(tmp_path):
    error, headline = run(Refusing(), tmp_path)
    assert "only twice" in str(error)
    assert not hasattr(error, "__notes__")
    assert " raised RuntimeError" in headline["text"]


def test_a_model_can_be_trained_again_afterwards(tmp_path):
    model = model_with(Norm(name="norm"))
    for folder in "ab":
        watcher = kmp.MixPrecMonitor(tmp_path / folder, verbose=0)
        with pytest.raises(RuntimeError, match="between 0 and 1") as caught:
            model.fit(X, Y, callbacks=[watcher], verbose=0)
        assert "norm" in caught.value.__notes__[0]


def test_nothing_is_diagnosed_without_memory_for_it(tmp_path):
    class Full(Refusing):
        error = torch.OutOfMemoryError("CUDA out of memory")

    error, _ = run(Full(), tmp_path, torch.OutOfMemoryError)
    assert not hasattr(error, "__notes__")


def classifier():
    inputs = keras.Input((16,))
    x = layers.Dense(8, "relu")(inputs)
    outputs = layers.Dense(1, "sigmoid", name="out")(x)
    return compiled(keras.Model(inputs, outputs))


@pytest.mark.parametrize("tuned", [False, True], ids=["alone", "tuned"])
@pytest.mark.parametrize("row", [3, 90])
@pytest.mark.parametrize("part", ["x", "y"])
def test_bad_data_is_named_where_the_loss_refuses_it(
    tmp_path, part, row, tuned
):
    data = {"x": X.copy(), "y": Y.astype("float32")}
    data[part][row] = np.nan
    watcher, tuner = monitor(tmp_path), kmp.PrecisionTuner(verbose=0)
    callbacks = [watcher, tuner][: 1 + tuned]
    with pytest.raises(RuntimeError, match="between 0 and 1") as caught:
        classifier().fit(data["x"], data["y"], callbacks=callbacks, **FIT)
    [verdict] = watcher.verdicts
    assert (verdict.kind, verdict.step) == ("bad_data", row // 32 + 1)
    assert verdict.numbers[f"samples_of_{part}"] == [row]
    assert f"isfinite({part})" in verdict.advice
    assert caught.value.__notes__ == [
        f"keras_mixprec, on the batch of this step: {verdict}"
    ]
    assert tuner.history == []


def test_bad_data_is_diagnosed_where_the_loss_refuses_it():
    x = X.copy()
    x[6, 3] = np.nan
    [verdict] = kmp.diagnose(classifier(), x, Y.astype("float32"))
    assert verdict.kind == "bad_data"
    assert verdict.numbers == {"rows_of_x": [6]}
    with pytest.raises(RuntimeError, match="between 0 and 1"):
        kmp.diagnose(classifier(), x, 255.0 * Y)


def test_training_is_not_said_to_go_on_where_it_ends(recwarn, monkeypatch):
    monkeypatch.delenv("KERAS_MIXPREC_STRICT", raising=False)
    tuner = kmp.PrecisionTuner(verbose=0)
    with pytest.raises(RuntimeError, match="between 0 and 1"):
        classifier().fit(X, 255.0 * Y, callbacks=[tuner], **FIT)
    assert not [w for w in recwarn if "goes on" in str(w.message)]
