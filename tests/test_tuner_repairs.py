"""Demoting what is at fault, and nothing else, while training goes on."""

import keras
import numpy as np
import pytest
from monitor_models import BACKEND, JITS, each_jit, each_optimizer, not_torch
from tuner_models import CURE, chain, demoted, done, fit, stream, tuner
from zoo import cases

import keras_mixprec as kmp
from keras_mixprec.devices import found, measured
from keras_mixprec.devices.processor import Processor

GOOD, BIG = 1.0, 1000.0


@each_jit
@each_optimizer
def test_a_model_that_cannot_work_never_takes_a_step(jit, wrap):
    model = chain(jit, wrap)
    callback = tuner()
    history = fit(model, [BIG] * 4, callback)
    assert history["loss"] == pytest.approx([1000 * 300 / 256], rel=1e-3)
    assert demoted(model) == CURE
    assert done(callback) == [0]
    assert model.optimizer.iterations.numpy() == 4


@each_jit
def test_a_fault_in_the_midst_of_training_is_repaired(jit):
    model = chain(jit)
    callback = tuner()
    fit(model, [GOOD] * 20 + [BIG] * 30, callback)
    assert demoted(model) == CURE
    (step,) = done(callback)
    # Seen at a look within ten steps, and in the next batch that fails.
    assert 20 < step <= 20 + 10 + 2
    # No step is skipped any more: 20 good ones, and those since the repair.
    assert model.optimizer.iterations.numpy() == 50 - (step - 20)


# The same operations in the same order, op by op.
@pytest.mark.skipif(BACKEND == "jax", reason="XLA may fuse them otherwise")
def test_repaired_at_first_it_is_as_if_built_so():
    (case,) = cases(["t5_ffn"])
    tuned = case.model("mixed_float16", False)
    found = case.fit(tuned, epochs=3, callbacks=[tuner()])
    known = case.model("mixed_float16", False, sorted(demoted(tuned)))
    assert case.fit(known, epochs=3) == found
    for ours, theirs in zip(
        [*tuned.weights, *tuned.optimizer.variables],
        [*known.weights, *known.optimizer.variables],
        strict=True,
    ):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())


@each_jit
def test_weights_and_optimizer_state_survive_a_repair(jit):
    model, before = chain(jit, rate=2**-20), {}

    class Snapshot(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            variables = [*self.model.weights, *inner(self.model).variables]
            before[batch] = [v.numpy().copy() for v in variables]

    callback = tuner()
    # The first in the list sees the model as the tuner left it.
    fit(model, [GOOD] * 20 + [BIG] * 20, callback, Snapshot())
    (step,) = done(callback)
    assert any(np.any(v) for v in before[20][3:])  # Momentum.
    for then, later in zip(before[20], before[step], strict=True):
        np.testing.assert_array_equal(then, later)


def inner(model):
    return model.optimizer.inner_optimizer


@each_jit
def test_the_loss_scale_comes_back_when_the_limit_is_gone(jit):
    model = chain(jit, scale=2.0**4)
    scales = []

    class Record(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            scales.append(float(self.model.optimizer.loss_scale))

    callback = tuner()
    fit(model, [GOOD] * 10 + [BIG] * 30, callback, Record())
    (step,) = done(callback)
    assert min(scales[:step]) < 2.0**4
    assert scales[step] >= 2.0**4


@each_jit
def test_evaluate_and_predict_follow(jit):
    model = chain(jit)
    x = np.full((4, 1), BIG, "float32")
    assert not np.isfinite(model.evaluate(x, x, verbose=0))
    assert not np.isfinite(model.predict(x, verbose=0)).any()
    fit(model, [BIG] * 4, tuner())
    assert np.isfinite(model.evaluate(x, x, verbose=0))
    np.testing.assert_allclose(
        model.predict(x, verbose=0), 1000 * 300 / 256, rtol=1e-3
    )


@each_jit
def test_faults_of_range_take_the_bfloat16_rung(jit):
    model = chain(jit)
    callback = tuner(bfloat16=True)
    fit(model, [BIG] * 4, callback)
    # The loss would be of outputs with eight bits.
    assert demoted(model) == CURE | {"big": "mixed_bfloat16"}


@each_jit
def test_bfloat16_that_was_measured_to_be_fast_is_a_rung(jit, monkeypatch):
    cpu = Processor("some CPU", ("AVX512-BF16",))
    monkeypatch.setattr(found, "this_processor", lambda: cpu)
    speed = measured.Measured({"bfloat16": 1.9}, (), "2026-11-23", False)
    for expected in ("float32", "mixed_bfloat16"):
        model, callback = chain(jit), tuner()
        fit(model, [BIG] * 4, callback)
        assert demoted(model) == CURE | {"big": expected}
        assert measured.save(found.find_devices(), speed)
    assert callback.history[0]["message"].endswith(
        "; bfloat16 has enough range, and doctor measured bfloat16 training "
        "at 1.90 times float32's speed here on 2026-11-23"
    )


@each_jit
def test_faults_of_precision_do_not(jit):
    (case,) = cases(["bn_variance_200"])
    model = case.model("mixed_float16", jit)
    case.fit(model, epochs=1, callbacks=[tuner(bfloat16=True)])
    assert demoted(model)["naive_bn"] == "float32"


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
    callback = tuner()
    case.fit(model, epochs=2, callbacks=[callback])
    assert isinstance(model.optimizer, kmp.LossScaleOptimizer)
    assert [e["kind"] for e in callback.history] == ["loss_scaling"]


@pytest.mark.parametrize(
    ("name", "jit"),
    [
        ("initial_scale_too_high", next(iter(JITS))),
        ("learning_rate_too_high", next(iter(JITS))),
        *(("nan_data", jit) for jit in JITS),
    ],
)
def test_what_is_no_matter_of_precision_changes_nothing(name, jit):
    (case,) = cases([name])
    model = case.model("mixed_float16", jit)
    before = demoted(model)
    callback = tuner()
    case.fit(model, epochs=3, callbacks=[callback])
    assert callback.history == []
    assert demoted(model) == before


class Doubled(keras.Model):
    """A subclassed model with a shared layer, two inputs and its own step."""

    def __init__(self):
        super().__init__()
        self.shared = keras.layers.Dense(
            1, use_bias=False, kernel_initializer=_constant(300.0), name="big"
        )
        self.head = keras.layers.Dense(
            1, use_bias=False, kernel_initializer=_constant(1.0), name="head"
        )

    def call(self, inputs):
        return self.head(self.shared(inputs["a"]) * 0.001) + self.shared(
            inputs["b"]
        )


def _constant(value):
    return keras.initializers.Constant(value)


@each_jit
def test_a_subclassed_model_with_a_shared_layer_and_a_dict_of_inputs(jit):
    keras.config.set_dtype_policy("mixed_float16")
    model = Doubled()
    model.compile(
        kmp.LossScaleOptimizer(keras.optimizers.SGD(0.0)),
        loss="mae",
        jit_compile=jit,
    )
    x = {"a": np.full((8, 1), BIG), "b": np.ones((8, 1))}
    callback = tuner()
    history = model.fit(
        x, np.zeros((8, 1)), batch_size=4, verbose=0, callbacks=[callback]
    ).history
    assert history["loss"] == pytest.approx([300 + 300], rel=1e-2)
    assert demoted(model)["big"] == "float32"
    assert done(callback) == [0]


@each_jit
def test_validation_data_are_evaluated_in_the_new_dtypes(jit):
    model = chain(jit)
    batch = next(stream([BIG]))
    history = fit(model, [BIG] * 4, tuner(), validation_data=batch)
    assert np.isfinite(history["val_loss"]).all()


@each_jit
def test_an_isolated_layer_is_demoted_with_the_others(jit):
    keras.config.set_dtype_policy("mixed_float16")

    def dense(name, factor, **arguments):
        return keras.layers.Dense(
            1, kernel_initializer=_constant(factor), name=name, **arguments
        )

    model = keras.Sequential(
        [
            keras.Input((1,)),
            dense("first", 1.0),
            dense("big", 1000.0),
            keras.layers.Rescaling(1e-3, name="small"),
            keras.layers.Activation("relu", name="alone"),
            dense("last", 1.0, dtype="float32"),
        ]
    )
    model.compile(
        kmp.LossScaleOptimizer(keras.optimizers.SGD(2.0**-30), initial_scale=1),
        loss="mae",
        jit_compile=jit,
    )
    callback = tuner()
    fit(model, [BIG] * 4, callback)
    assert set(demoted(model)) == {"big", "small", "alone", "last"}
    assert "casts cost more" in callback.plan.reasons["alone"]
    assert len(done(callback)) == 1


class Within(keras.layers.Layer):
    """Two layers, of which the second's kernel has a large gradient."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.up = keras.layers.Dense(8, name="up")
        self.down = keras.layers.Dense(8, name="down")

    def build(self, input_shape):
        self.up.build(input_shape)
        self.down.build(input_shape)
        self.up.kernel.assign(self.up.kernel * 1e3)
        self.down.kernel.assign(self.down.kernel * 1e-3)

    def call(self, x):
        return self.down(self.up(x))


class Around(keras.layers.Layer):
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
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8,))
    x = Around(name="around")(keras.layers.Dense(8, name="first")(inputs))
    x = keras.layers.Dense(3, name="head")(x)
    faint = keras.layers.Dense(3, name="faint")(inputs)
    faint = keras.layers.Rescaling(1e-12, name="less")(faint)
    model = keras.Model(inputs, keras.layers.Add(name="add")([x, faint]))
    wide = [kmp.PrecisionRule(name) for name in ("head", "less", "add")]
    kmp.apply_policy(model, "mixed_float16", rules=wide)
    rule = kmp.FixedLossScale(2.0**10)
    model.compile(
        kmp.LossScaleOptimizer(keras.optimizers.SGD(1e-6), rule),
        "mse",
        jit_compile=False,
    )
    x = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")
    callback = tuner()
    model.fit(x, x[:, :3], verbose=0, epochs=2, callbacks=[callback])
    found = demoted(model)
    assert "around/within/down" in found
    assert "first" not in found
    assert "around/within/up" not in found
    around = {"around", "around/within"} <= found.keys()
    assert around == (BACKEND == "tensorflow")
    assert model.optimizer.skipped_steps == 0
