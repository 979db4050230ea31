"""A trained model in 16 bits for inference: what is stored, and how far off."""

import keras
import numpy as np
import pytest
from keras import layers

import keras_mixprec as kmp
from keras_mixprec.inference import latency

RANDOM = np.random.default_rng(0)


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
    x = layers.MultiHeadAttention(2, 4)(inputs, inputs)
    inner = keras.Sequential([keras.Input((6, 8)), shared], name="inner")
    x = layers.BatchNormalization(name="statistics")(inner(shared(x)))
    x = Block()(layers.TimeDistributed(layers.Dense(8))(x))
    x = layers.GRU(8)(x)
    return keras.Model(inputs, layers.Dense(3, activation="softmax")(x))


def state_of(model):
    policies = [layer.dtype_policy.name for layer in model._flatten_layers()]
    return model.get_weights(), policies, model.predict_function


def assert_same(before, after):
    assert before[1:] == after[1:]
    for a, b in zip(before[0], after[0], strict=True):
        np.testing.assert_array_equal(a, b)


X = RANDOM.normal(size=(20, 6, 8)).astype("float32")


# On JAX no CPU has attention in float16.
LOW = "bfloat16" if keras.backend.backend() == "jax" else "float16"


def converted(model=None, policy=LOW, x=X, **kwargs):
    return kmp.convert_for_inference(
        model or mixed_graph(), policy, calibration=x, **kwargs
    )


def test_every_weight_but_statistics_has_16_bits():
    model, report = converted()
    wide = {v.path for v in model.weights if v.dtype != LOW}
    assert {path.split("/")[0] for path in wide} == {"statistics"}
    assert report.plan["block/dense_1"] == LOW
    assert report.plan["gru/gru_cell"] == LOW
    assert 0.49 < report.size["after"] / report.size["before"] < 0.56


def test_outputs_are_nearly_those_in_float32_and_of_its_dtype():
    model = mixed_graph()
    small, report = converted(model)
    exact, low = model.predict(X, verbose=0), small.predict(X, verbose=0)
    assert low.dtype == "float32"
    np.testing.assert_allclose(low, exact, atol=2e-2)
    largest = np.abs(exact - low).max()
    assert report.drift[0]["largest"] == pytest.approx(largest, rel=0.1)
    mean = np.abs(exact - low).mean()
    assert report.drift[0]["mean"] == pytest.approx(mean, rel=0.1)
    assert report.drift[0]["top1_agreement"] == 1.0


def test_models_are_timed_in_turns(monkeypatch):
    """Each tenth batch is slow, whichever model has it."""
    timed = []

    def seconds(model, x):
        timed.append(model)
        slow = 10.0 if len(timed) % 10 == 0 else 1.0
        return slow * (0.3 if model == "float32" else 0.2)

    monkeypatch.setattr(latency, "_seconds", seconds)
    found = latency.latency("float32", "float16", X)
    assert found["speedup"] == found["before"] / found["after"]
    assert found["speedup"] == pytest.approx(1.5)
    assert found["pairs"] == 40
    assert timed[2:6] == ["float32", "float16", "float16", "float32"]


def test_the_model_is_only_read():
    model = mixed_graph()
    model.compile("adam", "mse")
    model.predict(X, verbose=0)
    before, random = state_of(model), np.random.get_state()[1].tolist()
    converted(model)
    assert_same(before, state_of(model))
    assert np.random.get_state()[1].tolist() == random
    assert keras.config.dtype_policy().name == "float32"


def test_layers_are_shared_as_in_a_file():
    inputs = keras.Input((4,))
    shared = layers.Dense(4, name="shared")
    model = keras.Model(inputs, shared(shared(inputs)))
    small, report = converted(model, x=X[:, 0, :4])
    assert len(small.weights) == 2
    assert report.size["after"] * 2 == report.size["before"]


def test_subclassed_model_without_a_config_of_its_own():
    model = Subclassed()
    exact = model.predict(X[:, 0], verbose=0)
    small, report = converted(model, x=X[:, 0])
    assert {v.dtype for v in small.weights} == {LOW}
    assert dict(report.plan) == {"dense": LOW, "dense_1": LOW}
    np.testing.assert_allclose(small.predict(X[:, 0]), exact, atol=3e-2)


class Warmup(keras.optimizers.schedules.LearningRateSchedule):
    """Has no `get_config`, as most schedules that people write."""

    def __call__(self, step):
        return 1e-3 * keras.ops.minimum(keras.ops.cast(step, "float32"), 1.0)


class OwnMetric(keras.metrics.Mean):
    def get_config(self):
        raise NotImplementedError


@pytest.mark.parametrize("nested", [False, True])
def test_the_config_of_training_is_not_needed(nested):
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
    model.compile(keras.optimizers.Adam(Warmup()), "mse", metrics=[OwnMetric()])
    if nested:
        model = keras.Sequential([keras.Input((4,)), model])
    x = RANDOM.normal(size=(8, 4)).astype("float32")
    small, _ = kmp.convert_for_inference(model, "bfloat16", calibration=x)
    np.testing.assert_allclose(small.predict(x), model.predict(x), atol=0.05)


def test_a_plan_from_training_is_followed():
    model = mixed_graph()
    plan = kmp.apply_policy(mixed_graph(), "mixed_bfloat16", rules=[])
    policies = {**plan, "shared": "float32", "block/dense": "float32"}
    small, report = converted(model, kmp.PrecisionPlan(policies))
    assert report.plan["shared"] == "float32"
    assert report.plan["block/dense"] == "float32"
    assert report.plan["statistics"] == "mixed_bfloat16"
    assert small.get_layer("shared").kernel.dtype == "float32"
    # What a nested model shares, Keras makes two of.
    assert report.plan["inner/shared"] == "float32"


def test_sequential_keeps_indices_of_an_embedding():
    stack = [layers.Embedding(5000, 4), layers.Flatten(), layers.Dense(2)]
    model = keras.Sequential(stack)
    x = np.arange(4000, 4060).reshape(20, 3)
    exact = model.predict(x, verbose=0)
    small, report = converted(model, x=x)
    np.testing.assert_allclose(small.predict(x), exact, atol=1e-3)
    assert report.size["after"] * 2 == report.size["before"]


def test_outputs_may_stay_in_16_bits():
    small, report = converted(keep_io=None)
    assert small.predict(X, verbose=0).dtype == LOW
    assert report.drift[0]["relative"] < 0.02


def test_ranges_are_those_of_the_calibration_data():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2, name="d")])
    model.set_weights([np.full((4, 2), 2.0**9), np.zeros(2)])
    x = np.ones((3, 4), "float32")
    _, report = converted(model, "float16", x=x)
    (row,) = report.layers
    assert row["largest"] == 2.0**11
    assert row["headroom_bits"] == pytest.approx(np.log2(65504 / 2**11))


def test_cells_of_recurrent_layers_have_a_range_and_seeds_no_bytes():
    inputs = keras.Input((6, 8))
    x = layers.Dropout(0.5)(layers.LSTM(8, dropout=0.5)(inputs))
    _, report = converted(keras.Model(inputs, layers.Dense(3)(x)))
    found = {row["path"]: row for row in report.layers}
    assert found["lstm/lstm_cell"]["largest"] > 0.1
    assert found["dropout"]["bytes"] == 0
    assert report.size["after"] * 2 == report.size["before"]


def test_reasons_are_whole_in_the_text():
    reason = "one of them, " + "and more " * 20
    rules = [kmp.PrecisionRule("shared", reason=reason.strip())]
    _, report = converted(rules=rules)
    said = " ".join(str(report).split())
    assert f"shared: {reason.strip()}" in said


def test_a_metric_is_measured_in_both():
    def mean(model):
        return model.predict(X, verbose=0).mean()

    _, report = converted(metric=mean)
    assert report.metric["name"] == "mean"
    assert report.metric["before"] == pytest.approx(1 / 3, abs=1e-3)
    assert report.metric["after"] == pytest.approx(1 / 3, abs=1e-3)


def test_recurrent_layers_come_back_from_a_file(tmp_path):
    inputs = keras.Input((6, 8))
    x = layers.Bidirectional(layers.LSTM(8))(
        layers.LayerNormalization()(inputs)
    )
    model = keras.Model(inputs, layers.Dense(3, activation="softmax")(x))
    small, report = converted(model)
    small.save(tmp_path / "small.keras")
    # Keras cannot draw orthogonal weights in 16 bits, and need not.
    loaded = keras.saving.load_model(tmp_path / "small.keras")
    y = small.predict(X, verbose=0)
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), y)
    assert report.notes == []


def test_what_encloses_a_wide_part_is_wide_so_that_a_file_keeps_it():
    model = mixed_graph()
    rule = kmp.PrecisionRule("multi_head_attention/query")
    _, report = converted(model, rules=[rule])
    assert report.plan["multi_head_attention"] == "float32"
    assert report.plan["multi_head_attention/key"] == "float32"
    assert report.plan["gru"] == LOW


def test_what_a_file_does_not_keep_is_said():
    model = Subclassed()
    model(X[:, 0])
    _, report = converted(model, x=X[:, 0])
    assert "cannot be loaded" in report.notes[0]
    _, report = converted()
    assert f"set_dtype_policy({LOW!r})" in report.notes[0]


def test_what_cannot_be_compiled_is_wide():
    inputs = keras.Input((6, 8))
    x = layers.MultiHeadAttention(2, 4, name="attention")(inputs, inputs)
    model = keras.Model(inputs, layers.Dense(3)(x))
    small, report = converted(model, "float16")
    wide = keras.backend.backend() == "jax"
    assert (report.plan["attention"] == "float32") == wide
    assert small.predict(X, verbose=0).shape == (20, 6, 3)


def test_tolerance_that_cannot_be_kept_names_the_layer_and_changes_nothing():
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(4, name="a"), layers.Dense(4)]
    )
    model.get_layer("a").kernel.assign(np.full((4, 4), 2e4))
    before = state_of(model)
    with pytest.raises(ValueError, match="'a'.* reach 8e"):
        converted(
            model,
            kmp.PrecisionPlan({"a": "mixed_float16", "dense": "float32"}),
            x=X[:, 0, :4] * 0 + 1,
        )
    assert_same(before, state_of(model))


def overflowing():
    """The first layer's outputs reach 8e4; of the last, any format has them.

    An ELU hands no power of two on, so that the layer cannot be rescaled.
    """
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(4, "elu", name="big"),
            layers.LayerNormalization(name="norm"),
            layers.Dense(64, name="wide"),
            layers.Dense(3, name="head"),
        ]
    )
    model.get_layer("big").kernel.assign(np.diag([2e4, 4e4, 6e4, 9e4]))
    return model


def test_the_fewest_layers_stay_in_float32():
    x = np.abs(X[:, 0, :4]) + 1
    small, report = converted(overflowing(), "float16", x=x)
    assert report.wide_layers == ["big"]
    assert "big" in report.plan.reasons
    assert np.isfinite(small.predict(x, verbose=0)).all()
    small, report = converted(overflowing(), "bfloat16", x=x)
    assert report.wide_layers == []


def test_a_layer_without_init_is_rebuilt_and_kept_wide():
    inputs = keras.Input((4,))
    outputs = layers.Dense(2)(OwnNorm(name="norm")(inputs))
    small, report = converted(
        keras.Model(inputs, outputs), "float16", x=X[:, 0, :4] * 500
    )
    assert report.wide_layers == ["norm"]
    assert type(small.get_layer("norm")) is OwnNorm


def test_the_format_is_chosen_and_what_it_brings_is_said():
    x = np.abs(X[:, 0, :4]) + 1
    small, report = converted(overflowing(), "auto", x=x)
    assert report.policy in ("float16", "bfloat16")
    said = " ".join(report.notes)
    assert "would be" in said
    assert ("no speed" in said) == (report.latency["speedup"] < 1.1)


@pytest.mark.parametrize(
    "policy", [pytest.param("auto", marks=pytest.mark.slow), "float16"]
)
def test_what_16_bits_cannot_hold_is_refused(policy):
    with pytest.raises(ValueError, match="is the worst"):
        converted(policy=policy, tolerance=1e-9)


def test_the_refusal_of_both_formats_has_a_sentence_on_each():
    with pytest.raises(ValueError, match="Neither format") as refusal:
        converted(policy="auto", tolerance=1e-9)
    said = str(refusal.value)
    assert all(
        f" Converted to {d} the" in said for d in ("float16", "bfloat16")
    )
    wrong = "Error", "other format", ";", "..", "  "
    assert not any(text in said for text in wrong)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_are_saved_in_16_bits_and_loaded_by_keras(dtype, tmp_path):
    model, other = mixed_graph(), mixed_graph()
    model.save_weights(tmp_path / "wide.weights.h5")
    kmp.save_weights(model, tmp_path / "small.weights.h5", dtype)
    other.load_weights(tmp_path / "small.weights.h5")
    for own, loaded in zip(model.weights, other.weights, strict=True):
        array = keras.ops.convert_to_numpy(own.value)
        rounded = array.astype(dtype).astype(array.dtype)
        found = keras.ops.convert_to_numpy(loaded.value)
        np.testing.assert_array_equal(found, rounded)
    model.get_layer("shared").kernel.assign(np.full((8, 8), 1e39**0.5))
    if dtype == "float16":
        with pytest.raises(ValueError, match="dense.*65504"):
            kmp.save_weights(model, tmp_path / "no.weights.h5", dtype)
    assert not (tmp_path / "no.weights.h5").exists()
