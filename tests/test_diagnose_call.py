"""`diagnose_call`: functions that call a model, such as decoding loops."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_mixprec as kmp

BACKEND = keras.backend.backend()
STEPS, WORDS = 5, 7
# Of the words that follow each other, the third has large features.
SIZES = [1.0, 1.0, 2.0, 300.0, 1.0, 1.0, 1.0]


class Root(layers.Layer):
    """Its squares overflow beyond 255."""

    def call(self, x):
        return ops.sqrt(ops.square(x))


def speaker(sizes=SIZES, name="root"):
    """A model by which each word is followed by the next one."""
    words = layers.Embedding(WORDS, WORDS, name="words")
    head = layers.Dense(WORDS, use_bias=False, name="head")
    ids = keras.Input((), dtype="int32")
    model = keras.Model(ids, head(Root(name=name)(words(ids))))
    words.embeddings.assign(np.diag(sizes))
    head.kernel.assign(np.roll(np.eye(WORDS), 1, axis=1))
    kmp.apply_policy(model, "mixed_float16", rules=[])
    return model


def step(model, tokens, index):
    logits = model(ops.take(tokens, index, axis=1), training=False)
    following = ops.cast(ops.argmax(logits, axis=-1), "int32")[:, None]
    return ops.slice_update(tokens, [0, index + 1], following)


def start():
    tokens = np.zeros((2, STEPS + 1), "int32")
    tokens[:, 0] = 1
    return tokens


def in_python(model, tokens):
    tokens = ops.convert_to_tensor(tokens)
    for index in range(STEPS):
        tokens = step(model, tokens, index)
    return ops.convert_to_numpy(tokens)


def in_while_loop(model, tokens):
    def body(tokens, index):
        return step(model, tokens, index), index + 1

    state = ops.convert_to_tensor(tokens), ops.convert_to_tensor(0, "int32")
    return ops.while_loop(lambda _, index: index < STEPS, body, state)[0]


def in_fori_loop(model, tokens):
    tokens = ops.convert_to_tensor(tokens)
    return ops.fori_loop(0, STEPS, lambda i, t: step(model, t, i), tokens)


def in_scan(model, tokens):
    def body(tokens, index):
        return step(model, tokens, index), index

    return ops.scan(body, ops.convert_to_tensor(tokens), ops.arange(STEPS))[0]


def compiled(model, tokens):
    if BACKEND == "torch":
        return in_while_loop(model, tokens)
    if BACKEND == "jax":
        import jax

        return jax.jit(lambda tokens: in_while_loop(model, tokens))(tokens)
    import tensorflow as tf

    return tf.function(lambda tokens: in_while_loop(model, tokens))(tokens)


LOOPS = [in_python, in_while_loop, in_fori_loop, in_scan, compiled]


def found(verdicts):
    return [(v.layer, v.kind, v.numbers.get("call")) for v in verdicts]


@pytest.mark.parametrize("loop", LOOPS)
def test_what_overflows_at_the_third_step(loop):
    model = speaker()
    (verdict,) = kmp.diagnose_call(model, loop, model, start())
    assert found([verdict]) == [("root", "forward_overflow", 3)]
    assert verdict.direction == "forward"
    exact = np.square(np.float64(SIZES[3]))
    assert verdict.numbers["largest_inside_in_float32"] == exact


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_in_which_all_is_well(loop):
    model = speaker([1.0, 1.0, 2.0, 200.0, 1.0, 1.0, 1.0])
    assert kmp.diagnose_call(model, loop, model, start()) == []


@pytest.mark.parametrize("mapped", [ops.map, ops.vectorized_map])
def test_a_map_over_batches(mapped):
    model = speaker()
    words = ops.convert_to_tensor(np.arange(6, dtype="int32").reshape(6, 1))
    verdicts = kmp.diagnose_call(model, lambda: mapped(model, words))
    assert found(verdicts) == [("root", "forward_overflow", 4)]


def test_predict_of_several_batches_changes_nothing():
    model = speaker()
    words = np.array([1, 2, 3, 4], "int32")
    before = model.predict(words[:2], verbose=0)
    function = model.predict_function
    arguments = {"batch_size": 1, "verbose": 0}
    model.jit_compile = False
    verdicts = kmp.diagnose_call(model, model.predict, words, **arguments)
    assert found(verdicts) == [("root", "forward_overflow", 3)]
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


def test_a_model_that_is_not_built_and_a_generator_of_several_models():
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential([layers.Dense(4, name="first"), Root(name="root")])
    x = np.random.default_rng(0).normal(size=(4, 3)).astype("float32")

    def halves(x):
        yield model(x[:2])
        yield model(1e3 * x[2:])

    assert found(kmp.diagnose_call(model, halves, x)) == [
        ("root", "forward_overflow", 2)
    ]


def test_bad_rows_weights_and_what_float32_fails_at():
    model = keras.Sequential([keras.Input((2,)), layers.Dense(2, name="dense")])
    kmp.apply_policy(model, "mixed_float16", rules=[])
    x = np.ones((4, 2), "float32")
    bad = np.where(np.arange(4)[:, None] == 2, np.nan, x)
    (verdict,) = kmp.diagnose_call(model, model, bad)
    assert (verdict.kind, verdict.numbers) == (
        "bad_data",
        {"rows_of_args": [2]},
    )

    def inverse(x):
        return model(ops.log(-ops.convert_to_tensor(x)))

    (verdict,) = kmp.diagnose_call(model, inverse, x)
    assert (verdict.kind, verdict.layer) == ("divergence", None)
    model.layers[0].kernel.assign(np.full((2, 2), 1e5))
    (verdict, *_) = kmp.diagnose_call(model, model, x)
    assert (verdict.kind, verdict.layer) == ("weight_overflow", "dense")


def test_an_error_of_the_function_is_that_of_the_function():
    def broken():
        raise KeyError("cache")

    with pytest.raises(KeyError, match="cache"):
        kmp.diagnose_call(speaker(), broken)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("model", print), TypeError, "`model` must be a `keras.Model`"),
        ((None, print), TypeError, "`model` must be a `keras.Model`"),
        ((speaker, None), TypeError, "`fn` must be a function"),
        ((speaker, np.ones(3)), TypeError, "`fn` must be a function"),
        ((speaker, "generate"), TypeError, "`fn` must be a function"),
        ((speaker, dict), TypeError, "`fn` must be a function"),
        ((speaker, lambda: 3), ValueError, "calls no layer of the model"),
        ((speaker, len, [1]), ValueError, "calls no layer of the model"),
        ((speaker, list, iter([1])), TypeError, "`fn` must be a function"),
        ((speaker, len, iter([1])), ValueError, "read only once"),
        ((speaker, speaker(name="other"), np.ones(2)), ValueError, "no layer"),
    ],
)
def test_wrong_calls(arguments, error, message):
    model, *others = arguments
    if model is speaker:
        model = speaker()
    with pytest.raises(error, match=message):
        kmp.diagnose_call(model, *others)
