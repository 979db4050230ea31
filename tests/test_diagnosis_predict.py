"""`diagnose` without targets, as `predict` runs, and `diagnose_call`."""

import keras
import numpy as np
import pytest
from diagnosis_models import (
    Adds,
    Block,
    Overflowing,
    Own,
    compiled,
    everything,
    found,
    in_float16,
    model_of,
)
from keras import layers, ops
from monitor_models import BACKEND, each_jit, one_backend
from zoo.parts import Parts, dense

import keras_mixprec as kmp

X = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")


def functional(loss=None, jit=False):
    parts = dense(8), Overflowing(name="bad"), dense(3, name="head")
    model = model_of(*parts)
    if loss:
        compiled(model, loss)
    model.jit_compile = jit
    return model, X, "bad"


def sequential(loss=None, jit=False):
    """It is not built yet."""
    keras.config.set_dtype_policy("mixed_float16")
    parts = layers.Dense(8), Overflowing(name="bad"), layers.Dense(3)
    model = keras.Sequential(parts)
    model.jit_compile = jit
    return model, X, "bad"


class OfFeatures(Parts):
    def call(self, x, training=False):
        return self.block(x["features"], training=training)


def subclassed(loss=None, jit=False):
    keras.config.set_dtype_policy("mixed_float16")
    model = OfFeatures(block=Block)
    model.jit_compile = jit
    return model, {"features": 1e3 * X}, "block/bad"


@each_jit
@pytest.mark.parametrize(
    ("build", "loss"),
    [(functional, None), (functional, "mse"), (sequential, None)]
    + [(subclassed, None)],
)
def test_a_model_compiled_or_not(build, loss, jit):
    model, x, path = build(loss, jit)
    verdicts = kmp.diagnose(model, x)
    if jit and np.isfinite(model.predict(x, verbose=0)).all():
        # XLA fuses these operations and computes in float32.
        assert verdicts == []
        return
    (verdict,) = verdicts
    assert (verdict.layer, verdict.kind) == (path, "forward_overflow")
    assert verdict.direction == "forward"
    assert verdict.compiled == jit
    assert f"PrecisionRule('{path}')" in verdict.advice
    assert "loss" not in str(verdict)
    assert model.compiled == bool(loss)


@pytest.mark.long
def test_it_is_inference():
    """In training the batch's own mean and variance are small."""
    norm = layers.BatchNormalization(name="norm")
    model = model_of(norm, layers.Rescaling(1.0, name="next"))
    model.compile("sgd", "mse")
    norm.moving_variance.assign(np.full(8, 1e-10))
    exact = X / np.sqrt(np.float64(1e-10) + norm.epsilon) * 2100
    assert np.abs(exact).max() > 65504
    assert [path for path, _ in found(model, 2100 * X, X) if path] == []
    assert found(model, 2100 * X)[0][0] == "norm"


@pytest.mark.parametrize("build", [functional, sequential])
def test_nothing_is_changed(build):
    def state():
        drawn = keras.random.normal((4,), seed=3)
        outputs = model.predict(0.01 * X, verbose=0)
        return [ops.convert_to_numpy(drawn), outputs, *everything(model)]

    model, *_ = build()
    before = state()
    plan = kmp.PrecisionPlan.from_model(model)
    kmp.diagnose(model, X)
    assert kmp.PrecisionPlan.from_model(model) == plan
    for a, b in zip(before, state(), strict=True):
        np.testing.assert_array_equal(a, b)


def masked(by):
    """Returns scores, half of them masked as in attention."""
    return Own(lambda x: ops.where(ops.arange(8) % 2 == 0, x, by), name="mask")


HEALTHY = {
    "masked": lambda: [masked(-np.inf), layers.Softmax],
    "masked by number": lambda: [masked(-1e9), layers.Softmax],
    "returns masked": lambda: [masked(-1e9)],
    "attends": lambda: [
        layers.Reshape((4, 2)),
        dense(8),
        layers.EinsumDense("bsd,de->bse", (None, 8)),
        layers.GlobalMaxPooling1D,
    ],
    "drops": lambda: [layers.Dropout(0.5), layers.GaussianNoise(1.0)],
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_model(name):
    assert found(model_of(*HEALTHY[name]()), X) == []


def test_a_mask_is_not_blamed_for_what_is_wrong_elsewhere():
    bad = layers.Rescaling(1e3), Overflowing(name="bad")
    model = model_of(masked(-1e9), layers.Softmax, *bad)
    assert found(model, X) == [("bad", "forward_overflow")]


def test_what_float32_fails_at_is_no_matter_of_precision():
    model = model_of(layers.Lambda(ops.log, name="log"), dense(3))
    (verdict,) = kmp.diagnose(model, X)
    count = 3 * int((X < 0).any(axis=1).sum())
    assert (verdict.layer, verdict.kind) == (None, "divergence")
    assert verdict.numbers == {"nan_in_float32": count}
    assert "learning rate" not in verdict.advice


def test_bad_rows_and_lost_weights():
    x = X.copy()
    x[3, 2] = np.nan
    model, *_ = functional()
    (verdict,) = kmp.diagnose(model, x)
    assert verdict.kind == "bad_data"
    assert verdict.numbers == {"rows_of_x": [3]}
    model.layers[1].bias.assign(np.full(8, np.nan))
    assert [kind for _, kind in found(model, X)] == ["weights_lost"]


def test_a_loss_that_needs_no_targets_is_diagnosed_as_fit_runs_it():
    # As the divergence of an autoencoder: it overflows only as a loss.
    adds = Adds(lambda x: ops.mean(ops.square(1e3 * x)), name="adds")
    model = model_of(dense(8), adds, dense(8))
    assert found(model, X) == []
    compiled(model, None)
    assert found(model, X)[0] == ("adds", "forward_overflow")


class NeedsTargets(keras.Model):
    def train_step(self, data, *state):
        raise TypeError("This needs targets.")


def test_a_train_step_that_needs_targets():
    bad = Overflowing(name="bad")
    model = compiled(model_of(bad, dense(8), kind=NeedsTargets))
    assert found(model, X) == [("bad", "forward_overflow")]
    with pytest.raises(TypeError, match="needs targets"):
        kmp.diagnose(model, X, X)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X, X), "be compiled"),
        ((None,), "`x` must be"),
        ((["a", "b"],), "`x` must be"),
        ((X[:, :5],), "expected|incompatible"),
    ],
)
def test_wrong_calls(arguments, message):
    with pytest.raises(ValueError, match=message):
        kmp.diagnose(functional()[0], *arguments)
    with pytest.raises(TypeError, match="a `keras.Model`"):
        kmp.diagnose("model", *arguments)


# `diagnose_call`: functions that call a model, such as decoding loops.

STEPS, WORDS = 5, 7
# The third word of the sequence has large features.
SIZES = [1.0, 1.0, 2.0, 300.0, 1.0, 1.0, 1.0]
THIRD = ("root", "forward_overflow", 3)


def root():
    """Its squares overflow beyond 255."""
    return Own(lambda x: ops.sqrt(ops.square(x)), name="root")


def speaker(sizes=SIZES):
    """Returns a model that predicts the next word of a fixed sequence."""
    words = layers.Embedding(WORDS, WORDS, name="words")
    head = layers.Dense(WORDS, use_bias=False, name="head")
    model = model_of(words, root(), head, shape=(), dtype="int32")
    words.embeddings.assign(np.diag(sizes))
    head.kernel.assign(np.roll(np.eye(WORDS), 1, axis=1))
    return model


def step(model, tokens, index):
    logits = model(ops.take(tokens, index, axis=1), training=False)
    following = ops.cast(ops.argmax(logits, axis=-1), "int32")[:, None]
    return ops.slice_update(tokens, [0, index + 1], following)


def start():
    tokens = np.zeros((2, STEPS + 1), "int32")
    tokens[:, 0] = 1
    return ops.convert_to_tensor(tokens)


def in_python(model, tokens):
    for index in range(STEPS):
        tokens = step(model, tokens, index)
    return ops.convert_to_numpy(tokens)


def in_while_loop(model, tokens):
    def body(tokens, index):
        return step(model, tokens, index), index + 1

    state = tokens, ops.convert_to_tensor(0, "int32")
    return ops.while_loop(lambda _, index: index < STEPS, body, state)[0]


def in_scan(model, tokens):
    def body(tokens, index):
        return step(model, tokens, index), index

    return ops.scan(body, tokens, ops.arange(STEPS))[0]


def in_compiled(model, tokens):
    if BACKEND == "torch":
        return in_while_loop(model, tokens)
    if BACKEND == "jax":
        import jax

        return jax.jit(lambda tokens: in_while_loop(model, tokens))(tokens)
    import tensorflow as tf

    return tf.function(lambda tokens: in_while_loop(model, tokens))(tokens)


def found_in_call(model, *arguments, **keywords):
    verdicts = kmp.diagnose_call(model, *arguments, **keywords)
    return [(v.layer, v.kind, v.numbers.get("call")) for v in verdicts]


@pytest.mark.parametrize(
    "loop", [in_python, in_while_loop, in_scan, in_compiled]
)
def test_what_overflows_at_the_third_step_of_a_loop(loop):
    model = speaker()
    (verdict,) = kmp.diagnose_call(model, loop, model, start())
    said = verdict.layer, verdict.kind, verdict.numbers["call"]
    assert (*said, verdict.direction) == (*THIRD, "forward")
    exact = np.square(np.float64(SIZES[3]))
    assert verdict.numbers["largest_inside_in_float32"] == exact
    healthy = speaker([min(size, 200.0) for size in SIZES])
    assert found_in_call(healthy, loop, healthy, start()) == []


@pytest.mark.parametrize("mapped", [ops.map, ops.vectorized_map])
def test_a_map_over_batches(mapped):
    model = speaker()
    words = ops.convert_to_tensor(np.arange(6, dtype="int32").reshape(6, 1))
    said = found_in_call(model, lambda: mapped(model, words))
    assert said == [(*THIRD[:2], 4)]


def test_predict_of_several_batches_changes_nothing():
    model = speaker()
    words = np.array([1, 2, 3, 4], "int32")
    before = model.predict(words[:2], verbose=0)
    function = model.predict_function
    arguments = {"batch_size": 1, "verbose": 0}
    model.jit_compile = False
    assert found_in_call(model, model.predict, words, **arguments) == [THIRD]
    assert model.predict_function is function
    assert model.get_layer("root").compute_dtype == "float16"
    np.testing.assert_array_equal(model.predict(words[:2], verbose=0), before)


def test_a_sampler_draws_the_same_in_each_run_and_as_before():
    model, seeds = speaker(), keras.random.SeedGenerator(3)
    drawn = []

    def sampled(words):
        logits = model(words) + np.random.normal()
        drawn.append(float(keras.random.uniform((), seed=seeds)))
        yield ops.softmax(logits)

    state = ops.convert_to_numpy(seeds.state), np.random.get_state()[1].copy()
    (verdict,) = kmp.diagnose_call(model, sampled, np.array([1, 3]))
    assert verdict.layer == "root"
    assert len(drawn) > 1
    assert len(set(drawn)) == 1
    np.testing.assert_array_equal(seeds.state, state[0])
    np.testing.assert_array_equal(np.random.get_state()[1], state[1])


@pytest.mark.long
def test_a_model_that_is_not_built_and_a_generator_of_several_models():
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential([layers.Dense(4, name="first"), root()])

    def halves(x):
        yield model(x[:2])
        yield model(1e3 * x[2:])

    assert found_in_call(model, halves, X) == [(*THIRD[:2], 2)]


def test_bad_rows_of_a_call():
    model = in_float16(keras.Sequential([keras.Input((2,)), layers.Dense(2)]))
    x = np.ones((4, 2), "float32")
    bad = np.where(np.arange(4)[:, None] == 2, np.nan, x)
    (verdict,) = kmp.diagnose_call(model, model, bad)
    assert verdict.kind == "bad_data"
    assert verdict.numbers == {"rows_of_args[0]": [2]}


def test_an_error_of_the_function_is_that_of_the_function():
    def broken():
        raise KeyError("cache")

    with pytest.raises(KeyError, match="cache"):
        kmp.diagnose_call(speaker(), broken)


@one_backend
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("model", print), TypeError, "a `keras.Model`"),
        ((speaker, None), TypeError, "a function"),
        ((speaker, dict), TypeError, "a function"),
        ((speaker, lambda: 3), ValueError, "calls no layer"),
        ((speaker, list, iter([1])), TypeError, "a function"),
        ((speaker, len, iter([1])), ValueError, "iterator"),
        ((speaker, speaker, SIZES), ValueError, "no layer"),
    ],
)
def test_wrong_calls_of_a_function(arguments, error, message):
    model, *others = arguments
    model = speaker() if model is speaker else model
    with pytest.raises(error, match=message):
        kmp.diagnose_call(model, *others)
