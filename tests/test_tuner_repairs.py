"""The tuner demotes the layers at fault, and no others, during training."""

import keras
import numpy as np
import pytest
import tuner_models as models
from keras import layers, ops
from monitor_models import BACKEND, each_jit, each_optimizer, monitor
from tuner_models import BIG, CURE, GOOD, chain, demoted, done, tuned, tuner
from zoo import cases

import keras_mixprec as kmp
from keras_mixprec.devices import found, measured
from keras_mixprec.devices.processor import Processor

one_backend = pytest.mark.one_backend


@each_jit
@each_optimizer
def test_a_model_that_cannot_work_never_takes_a_step(jit, wrap):
    model = chain(jit, wrap=wrap)
    x, expected = np.full((4, 1), BIG, "float32"), 1000 * 300 / 256
    assert not np.isfinite(model.evaluate(x, 0 * x, verbose=0))
    assert not np.isfinite(model.predict(x, verbose=0)).any()
    data = {"validation_data": (x, 0 * x)}
    history = models.fit(model, [BIG] * 4, callback := tuner(), **data)
    for name in "loss", "val_loss":
        assert history[name] == pytest.approx([expected], rel=1e-3)
    assert demoted(model) == CURE
    assert done(callback) == [("demote", 0)]
    assert model.optimizer.iterations.numpy() == 4
    loss = model.evaluate(x, 0 * x, verbose=0)
    assert loss == pytest.approx(expected, rel=1e-3)
    predicted = model.predict(x, verbose=0)
    np.testing.assert_allclose(predicted, expected, rtol=1e-3)


@pytest.mark.long
@each_jit
@pytest.mark.parametrize(("scale", "rate"), [(1.0, 2.0**-30), (16.0, 2.0**-20)])
def test_a_fault_in_the_midst_of_training_is_repaired(scale, rate, jit):
    model = chain(jit, rate=rate, scale=scale)
    states, scales = [], []

    def note(batch, logs):
        if BACKEND == "jax":
            model.jax_state_sync()
        inner = model.optimizer.inner_optimizer
        variables = [*model.weights, *inner.variables]
        states.append([v.numpy().copy() for v in variables])
        scales.append(float(model.optimizer.loss_scale))

    # This callback runs after the tuner, so it sees the changed model.
    noting = keras.callbacks.LambdaCallback(on_train_batch_begin=note)
    _, callback = tuned([GOOD] * 20 + [BIG] * 30, noting, model=model)
    assert demoted(model) == CURE
    ((_, step),) = done(callback)
    # Seen at a look within ten steps, and in the next batch that fails.
    assert 20 < step <= 20 + 10 + 2
    # Weights and momentum did not change.
    assert any(np.any(v) for v in states[20][3:])
    for then, later in zip(states[20], states[step], strict=True):
        np.testing.assert_array_equal(then, later)
    if scale == 1.0:
        # No step is skipped any more: 20 good ones, and those since then.
        assert model.optimizer.iterations.numpy() == 50 - (step - 20)
    else:  # It falls, and comes back when the limit is gone.
        assert min(scales[:step]) < scale
    assert scales[step] >= scale


# The same operations in the same order, op by op.
@pytest.mark.long
@pytest.mark.skipif(BACKEND == "jax", reason="XLA may fuse them otherwise")
def test_repaired_at_first_it_is_as_if_built_so():
    (case,) = cases(["t5_ffn"])
    model = case.model("mixed_float16", False)
    found = case.fit(model, epochs=2, callbacks=[tuner()])
    known = case.model("mixed_float16", False, sorted(demoted(model)))
    assert case.fit(known, epochs=2) == found
    for ours, theirs in zip(
        [*model.weights, *model.optimizer.variables],
        [*known.weights, *known.optimizer.variables],
        strict=True,
    ):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())


@pytest.mark.long
@each_jit
def test_a_model_that_trains_unscaled_is_scaled_and_not_demoted(jit):
    (case,) = cases(["grad_underflow"])
    model, callback = case.model("mixed_float16", jit), tuner()
    case.fit(model, epochs=2, callbacks=[callback])
    assert isinstance(model.optimizer, kmp.LossScaleOptimizer)
    assert done(callback) == [("loss_scaling", 0)]


@one_backend
def test_an_isolated_layer_is_demoted_with_the_others():
    model = models.sequential(
        lambda: [
            models.times(1.0, "first"),
            models.times(1000.0, "big"),
            layers.Rescaling(1e-3, name="small"),
            layers.Activation("relu", name="alone"),
            models.times(1.0, "last", dtype="float32"),
        ]
    )
    _, callback = tuned([BIG] * 4, model=model)
    assert set(demoted(model)) == {"big", "small", "alone", "last"}
    assert "casts cost more" in callback.plan.reasons["alone"]
    assert done(callback) == [("demote", 0)]


class Within(layers.Layer):
    """Two layers; the kernel of the second one has a large gradient."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        starts = {"up": 350.0, "down": 3.5e-4}
        self.up, self.down = (
            layers.Dense(
                8,
                name=name,
                kernel_initializer=keras.initializers.RandomNormal(0, size),
            )
            for name, size in starts.items()
        )

    def call(self, x):
        return self.down(self.up(x))


class Around(layers.Layer):
    """Adds what it was given, in its own dtype."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.within = Within(name="within")

    def call(self, x):
        return x + self.within(x)


@pytest.mark.long
def test_a_repair_takes_along_all_that_it_takes_to_run():
    # TensorFlow does not add float32 to float16, two levels up from `down`. If
    # the gradients of `down` fit, those of `faint` vanish: no loss scale suits
    # both.
    inputs = keras.Input((8,))
    x = Around(name="around")(layers.Dense(8, name="first")(inputs))
    x = layers.Dense(3, name="head")(x)
    faint = layers.Dense(3, name="faint")(inputs)
    faint = layers.Rescaling(1e-12, name="less")(faint)
    model = keras.Model(inputs, layers.Add(name="add")([x, faint]))
    wide = [kmp.PrecisionRule(name) for name in ("head", "less", "add")]
    kmp.apply_policy(model, "mixed_float16", rules=wide)
    fixed = kmp.FixedLossScale(2.0**10)
    optimizer = kmp.LossScaleOptimizer(keras.optimizers.SGD(1e-9), fixed)
    model.compile(optimizer, "mse", jit_compile=False)
    x = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")
    model.fit(x, x[:, :3], verbose=0, epochs=2, callbacks=[tuner()])
    found = demoted(model)
    assert "around/within/down" in found
    assert found.keys().isdisjoint({"first", "around/within/up"})
    around = {"around", "around/within"} <= found.keys()
    assert around == (BACKEND == "tensorflow")
    assert model.optimizer.skipped_steps == 0


# Faults that the first 64 rows of a batch do not show.

X = np.random.default_rng(0).normal(size=(512, 8)).astype("float32")


class OverBatch(layers.Layer):
    """Divides by the root of the mean over all rows, the sum taken first."""

    def call(self, x):
        rows = ops.cast(ops.shape(x)[0], x.dtype)
        total = ops.sum(ops.square(x), axis=0) / rows
        return x / ops.sqrt(total + 1.0)


class Loud(layers.Layer):
    """Overflows where its input exceeds 255."""

    def call(self, x):
        return ops.sqrt(ops.square(x) + 1.0)


def train_on(x, layer):
    """Trains in batches of 512 rows; returns model and history."""
    model = models.sequential(
        lambda: [layer(name="layer"), layers.Dense(1, dtype="float32")],
        features=8,
        rate=0.01,
        scale=None,
    )
    options = {"batch_size": 512, "shuffle": False, "verbose": 0}
    model.fit(x, 0 * x[:, :1], callbacks=[callback := tuner()], **options)
    return model, callback.history


@pytest.mark.long
@pytest.mark.parametrize("sound", [0, 16])
def test_a_sum_over_all_rows(sound):
    # The sum of 64 squares is 32,000; the sum of 512 overflows. There is
    # no NaN, because x / infinity is 0. An audit is before step 16.
    x = np.tile(np.sign(X), (sound + 2, 1))
    x[sound * 512 :] *= 500.0**0.5
    model, (change,) = train_on(x, OverBatch)
    assert demoted(model)["layer"] == "float32"
    assert change["step"] == sound
    assert model.optimizer.skipped_steps == 0


@one_backend
def test_rows_that_overflow_are_named():
    x = X.copy()
    x[300:320] = 300.0
    model, (change,) = train_on(x, Loud)
    assert demoted(model)["layer"] == "float32"
    assert "306, 307], batch_rows_in_all=20" in str(change)


# Which rung a layer is demoted to.

RESCALE = {"rungs": ("rescale", "float32")}


@one_backend
def test_bfloat16_that_was_measured_to_be_fast_is_a_rung(monkeypatch):
    cpu = Processor("some CPU", ("AVX512-BF16",))
    monkeypatch.setattr(found, "this_processor", lambda: cpu)
    speed = measured.Measured({"bfloat16": 1.9}, (), "2026-11-23", False)
    # The loss would be of outputs with eight bits.
    for arguments, expected in (
        ({"bfloat16": True}, "mixed_bfloat16"),
        ({}, "float32"),
        ({}, "mixed_bfloat16"),
    ):
        model, callback = tuned([BIG] * 4, **arguments)
        assert demoted(model) == CURE | {"big": expected}
        if not arguments:
            assert measured.save(found.find_devices(), speed)
    for fact in "doctor", "1.90 times", "2026-11-23":
        assert fact in callback.history[0]["message"]


class Norm(layers.Layer):
    """x / |x|, whose squares overflow from 256 on."""

    def call(self, x):
        return x / ops.sqrt(ops.sum(x * x, axis=-1, keepdims=True) + 1e-6)


class Shifted(Norm):
    """A norm of what is shifted by a weight that is zero at first."""

    def build(self, input_shape):
        self.shift = self.add_weight(shape=(1,), initializer="zeros")

    def call(self, x):
        return super().call(x + self.shift)


def train_norm(layer, *callbacks, jit=None, **arguments):
    """The model and the loss of one epoch."""
    model = models.sequential(
        lambda: [
            layers.Dense(4, kernel_initializer="identity", name="first"),
            layer(name="layer", **arguments),
            layers.Dense(1, name="last"),
        ],
        features=4,
        rate=0.01,
        momentum=0.0,
        loss="mse",
        scale=None,
        jit=jit,
    )
    x = 400.0 * np.random.default_rng(0).normal(size=(32, 4))
    options = {"batch_size": 8, "verbose": 0, "shuffle": False}
    history = model.fit(x, np.ones((32, 1)), callbacks=[*callbacks], **options)
    return model, history.history["loss"]


@pytest.mark.long
@each_jit
def test_a_normalization_stays_in_float16(jit, tmp_path):
    path, watcher = tmp_path / "plan.json", monitor(tmp_path / "logs")
    model, loss = train_norm(Norm, tuner(path, **RESCALE), watcher, jit=jit)
    assert demoted(model) == {"layer": "rescaled(-6,0)_from_mixed_float16"}
    _, known = train_norm(Norm, jit=jit, dtype="float32")
    assert loss == pytest.approx(known, rel=1e-2)
    said = " ".join(str(watcher.report).split())
    assert "to rescaled float16" in said
    # Another run starts from the plan.
    again, _ = train_norm(Norm, callback := tuner(path, **RESCALE), jit=jit)
    assert done(callback) == [("start", 0)]
    assert demoted(again) == demoted(model)


@pytest.mark.long
def test_what_only_looks_homogeneous_is_demoted():
    model, _ = train_norm(Shifted, tuner(**RESCALE))
    assert demoted(model) == {"layer": "float32"}
