"""Demoting what is at fault, and nothing else, while training goes on."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from monitor_models import BACKEND, JITS, each_jit, each_optimizer, not_torch
from tuner_models import (
    BIG,
    CURE,
    GOOD,
    chain,
    compiled,
    demoted,
    diagnosed,
    done,
    entries,
    fit,
    kinds,
    sequential,
    stream,
    times,
    tuner,
)
from zoo import cases

import keras_mixprec as kmp


@each_jit
@each_optimizer
def test_a_model_that_cannot_work_never_takes_a_step(jit, wrap):
    model, callback = chain(jit, wrap=wrap), tuner()
    x, expected = np.full((4, 1), BIG, "float32"), 1000 * 300 / 256
    assert not np.isfinite(model.evaluate(x, 0 * x, verbose=0))
    assert not np.isfinite(model.predict(x, verbose=0)).any()
    batch = next(stream([BIG]))
    history = fit(model, [BIG] * 4, callback, validation_data=batch)
    for name in "loss", "val_loss":
        assert history[name] == pytest.approx([expected], rel=1e-3)
    assert demoted(model) == CURE
    assert done(callback) == [0]
    assert model.optimizer.iterations.numpy() == 4
    loss = model.evaluate(x, 0 * x, verbose=0)
    assert loss == pytest.approx(expected, rel=1e-3)
    predicted = model.predict(x, verbose=0)
    np.testing.assert_allclose(predicted, expected, rtol=1e-3)


@each_jit
@pytest.mark.parametrize(("scale", "rate"), [(1.0, 2.0**-30), (16.0, 2.0**-20)])
def test_a_fault_in_the_midst_of_training_is_repaired(scale, rate, jit):
    model, callback = chain(jit, rate=rate, scale=scale), tuner()
    states, scales = [], []

    def note(batch, logs):
        inner = model.optimizer.inner_optimizer
        variables = [*model.weights, *inner.variables]
        states.append([v.numpy().copy() for v in variables])
        scales.append(float(model.optimizer.loss_scale))

    # The first in the list sees the model as the tuner left it.
    noting = keras.callbacks.LambdaCallback(on_train_batch_begin=note)
    fit(model, [GOOD] * 20 + [BIG] * 30, callback, noting)
    assert demoted(model) == CURE
    (step,) = done(callback)
    # Seen at a look within ten steps, and in the next batch that fails.
    assert 20 < step <= 20 + 10 + 2
    # Weights and momentum are what they were.
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
@pytest.mark.skipif(BACKEND == "jax", reason="XLA may fuse them otherwise")
def test_repaired_at_first_it_is_as_if_built_so():
    (case,) = cases(["t5_ffn"])
    tuned = case.model("mixed_float16", False)
    found = case.fit(tuned, epochs=2, callbacks=[tuner()])
    known = case.model("mixed_float16", False, sorted(demoted(tuned)))
    assert case.fit(known, epochs=2) == found
    for ours, theirs in zip(
        [*tuned.weights, *tuned.optimizer.variables],
        [*known.weights, *known.optimizer.variables],
        strict=True,
    ):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())


@not_torch
@each_jit
def test_several_steps_per_execution(jit):
    model = chain(jit)
    model.steps_per_execution = 5
    fit(model, [GOOD] * 20 + [BIG] * 40, tuner())
    assert demoted(model) == CURE


@each_jit
def test_a_model_that_trains_unscaled_is_scaled_and_not_demoted(jit):
    (case,) = cases(["grad_underflow"])
    model = case.model("mixed_float16", jit)
    case.fit(model, epochs=2, callbacks=[callback := tuner()])
    assert isinstance(model.optimizer, kmp.LossScaleOptimizer)
    assert kinds(callback) == ["loss_scaling"]


@pytest.mark.parametrize(
    "name", ["initial_scale_too_high", "learning_rate_too_high", "nan_data"]
)
def test_what_is_no_matter_of_precision_changes_nothing(name, clock):
    (case,) = cases([name])
    model = case.model("mixed_float16", next(iter(JITS)))
    before = demoted(model)
    case.fit(model, epochs=3, callbacks=[callback := tuner()])
    assert callback.history == []
    assert demoted(model) == before


class Doubled(keras.Model):
    """A subclassed model with a shared layer, two inputs and its own step."""

    def __init__(self):
        super().__init__()
        self.shared = times(300.0, "big")
        self.head = times(1.0, "head")

    def call(self, inputs):
        small = self.shared(inputs["a"]) * 0.001
        return self.head(small) + self.shared(inputs["b"])


@each_jit
def test_a_subclassed_model_with_a_shared_layer_and_a_dict_of_inputs(jit):
    keras.config.set_dtype_policy("mixed_float16")
    model, callback = compiled(Doubled(), jit=jit, scale=None), tuner()
    x = {"a": np.full((8, 1), BIG), "b": np.ones((8, 1))}
    options = {"batch_size": 4, "verbose": 0, "callbacks": [callback]}
    history = model.fit(x, np.zeros((8, 1)), **options).history
    assert history["loss"] == pytest.approx([300 + 300], rel=1e-2)
    assert demoted(model)["big"] == "float32"
    assert done(callback) == [0]


def test_an_isolated_layer_is_demoted_with_the_others():
    model = sequential(
        lambda: [
            times(1.0, "first"),
            times(1000.0, "big"),
            layers.Rescaling(1e-3, name="small"),
            layers.Activation("relu", name="alone"),
            times(1.0, "last", dtype="float32"),
        ],
        rate=2.0**-30,
    )
    fit(model, [BIG] * 4, callback := tuner())
    assert set(demoted(model)) == {"big", "small", "alone", "last"}
    assert "casts cost more" in callback.plan.reasons["alone"]
    assert len(done(callback)) == 1


class Within(layers.Layer):
    """Two layers, of which the second's kernel has a large gradient."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.up = layers.Dense(8, name="up")
        self.down = layers.Dense(8, name="down")

    def build(self, input_shape):
        self.up.build(input_shape)
        self.down.build(input_shape)
        self.up.kernel.assign(self.up.kernel * 1e3)
        self.down.kernel.assign(self.down.kernel * 1e-3)

    def call(self, x):
        return self.down(self.up(x))


class Around(layers.Layer):
    """Adds what it was given, in its own dtype."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.within = Within(name="within")

    def build(self, input_shape):
        self.within.build(input_shape)

    def call(self, x):
        return x + self.within(x)


def test_a_repair_takes_along_all_that_it_takes_to_run():
    # TensorFlow does not add float32 to float16, two levels up from `down`.
    # Gradients of `faint` vanish wherever those of `down` fit: no loss scale
    # suits both.
    inputs = keras.Input((8,))
    x = Around(name="around")(layers.Dense(8, name="first")(inputs))
    x = layers.Dense(3, name="head")(x)
    faint = layers.Dense(3, name="faint")(inputs)
    faint = layers.Rescaling(1e-12, name="less")(faint)
    model = keras.Model(inputs, layers.Add(name="add")([x, faint]))
    wide = [kmp.PrecisionRule(name) for name in ("head", "less", "add")]
    kmp.apply_policy(model, "mixed_float16", rules=wide)
    fixed = kmp.FixedLossScale(2.0**10)
    optimizer = kmp.LossScaleOptimizer(keras.optimizers.SGD(1e-6), fixed)
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

ROWS = 512
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(ROWS, 8)).astype("float32")
Y = RANDOM.integers(0, 3, ROWS)


class OverBatch(layers.Layer):
    """Divides by the root of the mean over all rows, the sum taken first."""

    def call(self, x):
        rows = ops.cast(ops.shape(x)[0], x.dtype)
        total = ops.sum(ops.square(x), axis=0) / rows
        return x / ops.sqrt(total + 1.0)


class Loud(layers.Layer):
    def call(self, x):
        return ops.sqrt(ops.square(x) + 1.0)


def fit_batches(layer, x):
    inputs = keras.Input((8,))
    head = layers.Dense(3, dtype="float32", name="head")
    model = keras.Model(inputs, head(layer(name="layer")(inputs)))
    rules = [kmp.PrecisionRule("head")]
    kmp.apply_policy(model, "mixed_float16", rules=rules)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    compiled(model, 0.01, loss=loss, scale=None)
    options = {"batch_size": ROWS, "shuffle": False, "verbose": 0}
    y, callback = np.resize(Y, len(x)), tuner()
    model.fit(x, y, callbacks=[callback], **options)
    return model, callback


@pytest.mark.parametrize("sound", [0, 16])
def test_a_sum_over_all_rows(sound):
    # Squares of 500: the sum of 64 is 32,000, that of 512 beyond float16.
    # Nothing is NaN: x / infinity is 0. An audit is before step 16.
    x = np.tile(np.sign(X), (sound + 2, 1))
    x[sound * ROWS :] *= 500.0**0.5
    model, callback = fit_batches(OverBatch, x)
    assert demoted(model) == {"layer": "float32", "head": "float32"}
    assert done(callback) == [sound]
    assert model.optimizer.skipped_steps == 0


@pytest.mark.parametrize(
    ("first", "count", "named"),
    [
        (300, 1, "batch_rows=[300]"),
        (511, 1, "batch_rows=[511]"),
        (300, 20, "306, 307], batch_rows_in_all=20"),
    ],
)
def test_rows_that_overflow_are_named(first, count, named):
    x = X.copy()
    x[first : first + count] = 300.0
    model, callback = fit_batches(Loud, x)
    assert demoted(model) == {"layer": "float32", "head": "float32"}
    (change,) = entries(callback, "demote")
    assert named in str(change)


def test_a_sound_batch_is_examined_by_its_first_rows(monkeypatch):
    seen = diagnosed(monkeypatch)
    fit_batches(Loud, X)
    assert seen == [(0, 64)]
