"""Conversion of a trained model for inference: its variables and its error."""

import keras
import numpy as np
import pytest
from keras import layers

import keras_mixprec as kmp

BACKEND = keras.backend.backend()
# On JAX no CPU has attention in float16.
LOW = "bfloat16" if BACKEND == "jax" else "float16"
X = np.random.default_rng(0).normal(size=(20, 6, 8)).astype("float32")
ROWS = X[:, 0]
POSITIVE = np.abs(ROWS[:, :4]) + 1


@keras.saving.register_keras_serializable("test_inference_convert")
class Block(layers.Layer):
    """Makes its sublayers itself, one of them late, without a dtype."""

    def __init__(self, units=8, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.early = layers.Dense(units)

    def build(self, shape):
        self.late = layers.Dense(self.units)
        self.early.build(shape)
        self.late.build(shape)

    def call(self, x):
        return self.early(x) + self.late(x)

    def get_config(self):
        return {**super().get_config(), "units": self.units}


class OwnNorm(layers.Layer):
    """Has no `__init__`, as most small layers, and is not registered."""

    def call(self, x):
        squares = keras.ops.sum(x * x, axis=-1, keepdims=True)
        return x / keras.ops.sqrt(squares + 1e-6)


class Subclassed(keras.Model):
    """Takes no arguments, so that Keras cannot load it from a file."""

    def __init__(self):
        super().__init__()
        self.inside = layers.Dense(8, activation="relu")
        self.head = layers.Dense(3)

    def call(self, x):
        return self.head(self.inside(x))


def mixed_graph():
    """Attention, a shared layer, a nested model, statistics, a wrapper."""
    inputs = keras.Input((6, 8))
    shared = layers.Dense(8, name="shared")
    x = layers.MultiHeadAttention(2, 4, name="mha")(inputs, inputs)
    inner = keras.Sequential([keras.Input((6, 8)), shared], name="inner")
    x = layers.BatchNormalization(name="statistics")(inner(shared(x)))
    x = Block()(layers.TimeDistributed(layers.Dense(8))(x))
    x = layers.GRU(8)(x)
    return keras.Model(inputs, layers.Dense(3, activation="softmax")(x))


def converted(model, policy=LOW, x=X, **kwargs):
    return kmp.convert_for_inference(model, policy, calibration=x, **kwargs)


def state_of(model):
    return (
        [layer.dtype_policy.name for layer in model._flatten_layers()],
        model.predict_function,
        np.random.get_state()[1].tolist(),
        keras.config.dtype_policy().name,
        [weight.tolist() for weight in model.get_weights()],
    )


@pytest.fixture(scope="module")
def conversion():
    """A model, what it became, the report, and its state before and after."""
    model = mixed_graph()
    model.compile("adam", "mse")
    model.predict(X, verbose=0)
    before = state_of(model)
    small, report = converted(model)
    return model, small, report, before, state_of(model)


@pytest.mark.long
def test_every_weight_but_statistics_has_16_bits_and_the_model_none(conversion):
    _, small, report, before, after = conversion
    assert before == after
    wide = {v.path for v in small.weights if v.dtype != LOW}
    assert {path.split("/")[0] for path in wide} == {"statistics"}
    assert report.plan["block/dense_1"] == LOW
    assert report.plan["gru/gru_cell"] == LOW
    assert 0.49 < report.size["after"] / report.size["before"] < 0.56


@pytest.mark.long
def test_outputs_are_nearly_those_in_float32_and_of_its_dtype(conversion):
    model, small, report, *_ = conversion
    exact, low = model.predict(X, verbose=0), small.predict(X, verbose=0)
    assert low.dtype == "float32"
    np.testing.assert_allclose(low, exact, atol=2e-2)
    error = np.abs(exact - low)
    (drift,) = report.drift
    assert drift["largest"] == pytest.approx(error.max(), rel=0.1)
    assert drift["mean"] == pytest.approx(error.mean(), rel=0.1)
    agree = np.mean(exact.argmax(-1) == low.argmax(-1))
    assert drift["top1_agreement"] == pytest.approx(agree)
    # A file does not keep the dtypes of layers that other layers create.
    assert f"set_dtype_policy({LOW!r})" in report.notes[0]


@pytest.mark.long
def test_a_plan_from_training_is_followed():
    plan = kmp.apply_policy(mixed_graph(), "mixed_bfloat16", rules=[])
    policies = {**plan, "shared": "float32", "block/dense": "float32"}
    small, report = converted(mixed_graph(), kmp.PrecisionPlan(policies))
    # Keras makes two layers of one that a nested model shares.
    for path in "shared", "block/dense", "inner/shared":
        assert report.plan[path] == "float32"
    assert report.plan["statistics"] == "mixed_bfloat16"
    assert small.get_layer("shared").kernel.dtype == "float32"


@pytest.mark.long
def test_rules_are_followed_and_their_reasons_are_whole_in_the_text():
    reason = ("one of them, " + "and more " * 20).strip()
    query = kmp.PrecisionRule("mha/query")
    rules = [query, kmp.PrecisionRule("shared", reason=reason)]
    _, report = converted(mixed_graph(), rules=rules)
    # A layer around a wide part is wide too, so that a file keeps it.
    assert report.plan["mha"] == report.plan["mha/key"] == "float32"
    assert report.plan["gru"] == LOW
    assert f"shared: {reason}" in " ".join(str(report).split())


def test_a_subclassed_model_without_a_config_of_its_own():
    model = Subclassed()
    exact = model.predict(ROWS, verbose=0)
    small, report = converted(model, x=ROWS)
    assert {v.dtype for v in small.weights} == {LOW}
    assert dict(report.plan) == {"dense": LOW, "dense_1": LOW}
    low = small.predict(ROWS, verbose=0)
    assert low.dtype == LOW
    np.testing.assert_allclose(low.astype("float32"), exact, atol=3e-2)
    assert "save_weights" in report.notes[0]


class Warmup(keras.optimizers.schedules.LearningRateSchedule):
    """Has no `get_config`, as most schedules that people write."""

    def __call__(self, step):
        return 1e-3 * keras.ops.minimum(keras.ops.cast(step, "float32"), 1.0)


class OwnMetric(keras.metrics.Mean):
    def get_config(self):
        raise NotImplementedError


@pytest.mark.one_backend
def test_the_config_of_training_is_not_needed():
    model = keras.Sequential([keras.Input((8,)), layers.Dense(3)])
    model.compile(keras.optimizers.Adam(Warmup()), "mse", metrics=[OwnMetric()])
    small, _ = converted(model, "bfloat16", ROWS)
    exact = model.predict(ROWS, verbose=0)
    np.testing.assert_allclose(small.predict(ROWS), exact, atol=0.05)


@pytest.mark.long
def test_indices_of_an_embedding_are_kept():
    stack = [layers.Embedding(5000, 4), layers.Flatten(), layers.Dense(2)]
    model = keras.Sequential(stack)
    x = np.arange(4000, 4060).reshape(20, 3)
    exact = model.predict(x, verbose=0)
    small, report = converted(model, x=x)
    np.testing.assert_allclose(small.predict(x), exact, atol=1e-3)
    assert report.size["after"] * 2 == report.size["before"]


@pytest.mark.long
def test_recurrent_layers_come_back_from_a_file(tmp_path):
    inputs = keras.Input((6, 8))
    lstm = layers.LSTM(8, dropout=0.5, return_sequences=True, name="lstm")
    x = lstm(layers.LayerNormalization()(inputs))
    x = layers.Dropout(0.5)(layers.Bidirectional(layers.LSTM(8))(x))
    model = keras.Model(inputs, layers.Dense(3, activation="softmax")(x))
    small, report = converted(model)
    small.save(tmp_path / "small.keras")
    # Keras cannot draw orthogonal weights in 16 bits, and need not.
    loaded = keras.saving.load_model(tmp_path / "small.keras")
    y = small.predict(X, verbose=0)
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), y)
    assert report.notes == []
    # Cells have a range, and seeds no bytes.
    found = {row["path"]: row for row in report.layers}
    assert found["lstm/lstm_cell"]["largest"] > 0.1
    assert found["dropout"]["bytes"] == 0
    assert report.size["after"] * 2 == report.size["before"]


@pytest.mark.long
def test_what_cannot_be_compiled_is_wide():
    inputs = keras.Input((6, 8))
    x = layers.MultiHeadAttention(2, 4, name="attention")(inputs, inputs)
    model = keras.Model(inputs, layers.Dense(3)(x))
    small, report = converted(model, "float16")
    assert (report.plan["attention"] == "float32") == (BACKEND == "jax")
    assert small.predict(X, verbose=0).shape == (20, 6, 3)


def overflowing():
    first = layers.Dense(4, "elu", name="big")
    middle = layers.LayerNormalization(), layers.Dense(64)
    model = keras.Sequential([keras.Input((4,)), first, *middle])
    first.kernel.assign(np.diag([2e4, 4e4, 6e4, 9e4]))
    return model


@pytest.mark.one_backend
def test_the_format_is_chosen_and_what_it_brings_is_said():
    _, report = converted(overflowing(), "auto", POSITIVE)
    (other,) = {"float16", "bfloat16"} - {report.policy}
    # float16 needs layers in float32, and so more bytes, on every machine.
    assert (report.policy, report.wide_layers) == ("bfloat16", [])
    assert f"{other} would be" in " ".join(report.notes)


def test_a_layer_without_init_is_rebuilt_and_kept_wide():
    inputs = keras.Input((8,))
    model = keras.Model(inputs, layers.Dense(2)(OwnNorm(name="norm")(inputs)))
    small, report = converted(model, "float16", x=ROWS * 500)
    assert report.wide_layers == ["norm"]
    assert type(small.get_layer("norm")) is OwnNorm


@pytest.mark.one_backend
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_are_saved_in_16_bits_and_loaded_by_keras(dtype, tmp_path):
    model, other = mixed_graph(), mixed_graph()
    kmp.save_weights(model, tmp_path / "small.weights.h5", dtype)
    other.load_weights(tmp_path / "small.weights.h5")
    saved = zip(model.get_weights(), other.get_weights(), strict=True)
    for own, loaded in saved:
        rounded = own.astype(dtype).astype(own.dtype)
        np.testing.assert_array_equal(loaded, rounded)
    model.get_layer("shared").kernel.assign(np.full((8, 8), 1e39**0.5))
    if dtype == "float16":
        with pytest.raises(ValueError, match="dense.*65504"):
            kmp.save_weights(model, tmp_path / "no.weights.h5", dtype)
    assert not (tmp_path / "no.weights.h5").exists()
