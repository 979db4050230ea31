"""`diagnose`: accepted and refused calls, side effects, messages."""

import functools
import json

import keras
import numpy as np
import pytest
from diagnosis_models import (
    LOGITS,
    Overflowing,
    Own,
    compiled,
    demoted,
    everything,
    found,
    model_of,
    tuned,
)
from keras import layers, ops
from monitor_models import (
    BACKEND,
    each_jit,
    monitor,
    not_jax,
    only_tensorflow,
    only_torch,
)
from zoo.own_step import FunctionalOwnStep, OwnStep
from zoo.parts import Parts, dense

import keras_mixprec as kmp

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(16, 8)).astype("float32")
Y = RANDOM.integers(0, 3, 16)
ONES = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")


def faulty(*parts, **arguments):
    """A classifier whose last layer but one overflows."""
    parts = *parts, Overflowing(name="bad"), dense(3, name="head")
    return compiled(model_of(*parts, **arguments), LOGITS)


def healthy(*parts, **arguments):
    return compiled(model_of(*parts, dense(3), **arguments), LOGITS)


@pytest.mark.long
@pytest.mark.parametrize("build", [faulty, healthy])
def test_nothing_is_changed(build):
    def losses(asked):
        model = build(dense(8), layers.BatchNormalization, partial_dropout)
        model.fit(X, Y, shuffle=False, verbose=0)
        if asked:
            plan, before = (
                kmp.PrecisionPlan.from_model(model),
                everything(model),
            )
            call = keras.layers.Layer.__call__
            assert bool(found(model, X, Y)) == (build is faulty)
            assert kmp.PrecisionPlan.from_model(model) == plan
            assert keras.layers.Layer.__call__ is call
            for a, b in zip(before, everything(model), strict=True):
                np.testing.assert_array_equal(a, b)
            names = {"apply", "apply_gradients", "scale_loss"}
            assert not names & set(vars(model.optimizer))
        result = model.fit(X, Y, epochs=3, shuffle=False, verbose=0)
        return result.history["loss"]

    # Training goes on as if nothing had been.
    np.testing.assert_equal(losses(asked=True), losses(asked=False))


def partial_dropout():
    return layers.Dropout(0.5)


class OwnLossStep(FunctionalOwnStep):
    """A step of the user's own."""

    def loss_of(self, x, y):
        return self.compute_loss(x, y, self(x, training=True))


def test_a_train_step_of_the_users_own():
    model = faulty(dense(8), kind=OwnLossStep)
    model.optimizer.build(model.trainable_variables)
    before = everything(model)
    assert found(model, X, Y) == [("bad", "forward_overflow")]
    for a, b in zip(before, everything(model), strict=True):
        np.testing.assert_array_equal(a, b)


@not_jax  # It hands on its state itself.
def test_a_train_step_that_unscales_its_gradients(monkeypatch):
    # At 2**15 the gradients of `units` overflow. Unscaling them with another
    # scale hides that.
    class Unscales(kmp.LossScaleOptimizer):
        def apply(self, grads, variables=None):
            super().apply(self.unscale(grads), variables)

    def verdicts(wrapper):
        up = layers.Rescaling(1e3, name="up")
        parts = up, dense(8, name="units"), dense(3, name="head")
        model = model_of(*parts, wide=["head"], kind=OwnLossStep)
        optimizer = wrapper("adam", kmp.FixedLossScale(2.0**15))
        model.compile(optimizer, LOGITS, jit_compile=False)
        said = kmp.diagnose(model, X, Y)
        assert said == kmp.diagnose(model, X, Y)
        return said

    assert verdicts(Unscales) == verdicts(kmp.LossScaleOptimizer) != []


def test_an_optimizer_with_two_names():
    model = faulty()
    model.its_optimizer = model.optimizer
    assert found(model, 10 * X, Y) == [("bad", "forward_overflow")]


class OnlyStep(OwnStep):
    """A model that is never called as a whole."""

    def loss_of(self, x, y):
        return self.compute_loss(x, y, self.body(x, training=True))


@only_tensorflow
def test_a_model_without_a_call():
    def body(name):
        named = functools.partial(keras.Model, name=name)
        return model_of(Overflowing(name="bad"), dense(3), kind=named)

    model = compiled(OnlyStep(body=body), LOGITS)
    ((layer, kind),) = found(model, 10 * X, Y)
    assert (layer.rpartition("/")[2], kind) == ("bad", "forward_overflow")
    tuned(model, X, Y)


# Faults that no layer causes.


def with_inf():
    x = X.copy()
    x[[2, 5], 1] = np.inf
    return healthy(dense(8)), x


def with_kernel(value):
    def build():
        model = healthy(dense(8, name="gone"))
        model.get_layer("gone").kernel.assign(np.full((8, 8), value))
        return model, X

    return build


@pytest.mark.parametrize(
    ("build", "kind", "numbers", "advice"),
    [
        (with_inf, "bad_data", {"rows_of_x": [2, 5]}, "isfinite"),
        (with_kernel(np.nan), "weights_lost", {}, "checkpoint"),
        (with_kernel(3e38), "divergence", {}, "float32"),
    ],
)
def test_what_no_layer_is_to_blame_for_has_a_name(build, kind, numbers, advice):
    model, x = build()
    [verdict] = kmp.diagnose(model, x, Y)
    assert (verdict.layer, verdict.kind) == (None, kind)
    assert verdict.numbers.items() >= numbers.items()
    assert advice in verdict.advice
    assert kind != "weights_lost" or "gone" in verdict.numbers["first"]


def test_float32_models_have_nothing_to_say():
    layers_ = [keras.Input((8,)), Overflowing(), layers.Dense(3)]
    model = keras.Sequential(layers_)
    model.compile("adam", LOGITS, jit_compile=False)
    assert kmp.diagnose(model, X, Y) == []


def test_a_layer_that_does_not_repeat_itself_is_not_blamed():
    def noisy(x):  # Of which Keras knows nothing.
        return x + ops.cast(np.random.default_rng().normal(size=8), x.dtype)

    # Some draws have gradients that begin with too high a loss scale.
    verdicts = found(healthy(dense(8), Own(noisy)), X, Y)
    assert verdicts in ([], [(None, "scale_search")])


def test_a_verdict_is_json():
    [verdict] = kmp.diagnose(faulty(), X, Y, step=7)
    assert json.loads(json.dumps(verdict.to_dict()))["step"] == 7
    assert str(verdict).startswith("forward_overflow in 'bad'")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (lambda m: (3, X, Y), TypeError, "`keras.Model`. Received"),
        (lambda m: (model_of(dense(3)), X, Y), ValueError, "be compiled"),
        (lambda m: (m, [], Y), ValueError, "one batch"),
        (lambda m: (m, iter([(X, Y)])), ValueError, "next.iter.*Received: x="),
        (lambda m: (m, (X, Y)), ValueError, "inputs alone.*Received: x"),
        (lambda m: (m, X, Y[:3]), ValueError, "number of samples"),
    ],
)
def test_wrong_calls(arguments, error, message):
    with pytest.raises(error, match=message):
        kmp.diagnose(*arguments(healthy(dense(8))))


# Batches: as `fit` takes them.


class Prepared(Parts):
    """Subtracts in a custom `compute_loss`, without mixed dtypes in `fit`."""

    prepare = staticmethod(lambda x: x)

    def call(self, x):
        return self.dense(self.prepare(x))

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return ops.mean(ops.square(y - ops.cast(y_pred, "float32")))


def prepared(prepare=lambda x: x):
    keras.config.set_dtype_policy("mixed_float16")
    model = Prepared(dense=dense(1))
    model.prepare = prepare
    return compiled(model, None, initial_scale=16.0)


def times_number(x):
    return x["a"] * ops.cast(x["number"], x["a"].dtype)


@pytest.mark.parametrize("dtype", ["float64", "float16"])
@pytest.mark.parametrize("tensors", [False, True])
def test_floats_have_the_dtype_that_fit_casts_them_to(dtype, tensors):
    data = [a.astype(dtype) for a in ONES]
    if tensors:
        data = map(ops.convert_to_tensor, data)
    assert found(prepared(), *data) == []


@pytest.mark.parametrize("number", [0.5, np.float32(0.5), np.array(0.5)])
def test_a_number_may_stand_beside_arrays(number):
    model, (x, y) = prepared(times_number), ONES
    assert found(model, {"a": x, "number": number}, y) == []
    bad = x.copy()
    bad[3] = np.nan
    (verdict,) = kmp.diagnose(model, {"a": bad, "number": number}, y)
    assert verdict.kind == "bad_data"
    assert verdict.numbers["rows_of_x['a']"] == [3]


@only_tensorflow
def test_fit_is_watched_with_a_number_beside_arrays(tmp_path, recwarn):
    import tensorflow as tf

    batch = {"a": ONES[0], "number": np.float32(0.5)}, ONES[1]
    data = tf.data.Dataset.from_tensors(batch).repeat(40)
    watcher = kmp.MixPrecMonitor(tmp_path, verbose=0)
    tuned(prepared(times_number), data, callbacks=[watcher])
    said = [str(warning.message) for warning in recwarn]
    assert not [text for text in said if "goes on without" in text]


def test_a_fault_is_found_beside_sparse_inputs():
    scipy_sparse = pytest.importorskip("scipy.sparse")
    keras.config.set_dtype_policy("mixed_float16")
    inputs = keras.Input((4,), sparse=BACKEND == "tensorflow")
    first = layers.Dense(4, kernel_initializer="ones")
    square = layers.Lambda(lambda x: x * x * 1e-6, name="square")
    model = keras.Sequential([inputs, first, square, layers.Dense(1)])
    x, y = np.full((8, 4), 200.0, "float32"), ONES[1]
    named = found(compiled(model), scipy_sparse.csr_matrix(x), y)
    assert ("square", "forward_overflow") in named
    if BACKEND == "tensorflow":
        import tensorflow as tf

        assert found(model, tf.sparse.from_dense(x), y) == named


def stateful():
    keras.config.set_dtype_policy("mixed_float16")
    inputs = keras.Input(batch_shape=(96, 2, 2))
    x = layers.LSTM(4, stateful=True)(inputs)
    return compiled(keras.Model(inputs, layers.Dense(1)(x)))


def of_one_size():
    return prepared(lambda x: ops.reshape(x, (96, 4)))


@pytest.mark.long
@pytest.mark.parametrize(
    ("build", "shape"), [(stateful, (2, 2)), (of_one_size, (4,))]
)
def test_the_tuner_diagnoses_models_that_are_made_for_one_size(
    tmp_path, build, shape
):
    # Without a diagnosis it warns, which is an error.
    x, y = np.ones((960, *shape), "float32"), np.ones((960, 1), "float32")
    watcher = kmp.MixPrecMonitor(tmp_path, verbose=0)
    tuned(build(), x, y, 96, callbacks=[watcher])


@only_torch  # A `DataLoader` yields lists.
def test_a_list_stays_a_list(tmp_path):
    import torch

    seen = set()

    class Noting(keras.Model):
        def train_step(self, data):
            seen.add(type(data))
            return super().train_step(tuple(data))

    model = model_of(dense(1), shape=(4,), kind=Noting, policy="mixed_float16")
    data = torch.utils.data.TensorDataset(torch.ones(32, 4), torch.ones(32, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    watcher = monitor(tmp_path, probe_every=1)
    tuned(compiled(model), loader, callbacks=[watcher], shuffle=False)
    assert seen == {list}


class Ends(layers.Layer):
    """Sums the squares at the ends of the edges of 16 graphs."""

    def compute_output_shape(self, shapes):
        return 16, shapes[0][-1]

    def call(self, parts):
        nodes, ends, owners = parts
        squares = ops.square(ops.take(nodes, ends, axis=0))
        return ops.segment_sum(1e-6 * squares, owners, num_segments=16)


def graphs(jit):
    """A batch is whole: edges are numbers of nodes, not of the first rows'."""
    keras.config.set_dtype_policy("mixed_float16")
    inputs = keras.Input((4,)), *(keras.Input((), dtype="int32") for _ in "ab")
    model = keras.Model(inputs, layers.Dense(1)(Ends(name="ends")(inputs)))
    x = 300 * RANDOM.normal(size=(160, 4)).astype("float32")
    ends = np.arange(320, dtype="int32")[::-1] // 2
    owners = np.repeat(np.arange(16, dtype="int32"), 20)
    batch = (x, ends, owners), np.ones((16, 1), "float32")
    return compiled(model, jit=jit), batch


@pytest.mark.long
@each_jit
def test_parts_of_other_sizes_are_diagnosed(jit, tmp_path):
    model, batch = graphs(jit)
    assert {path for path, _ in found(model, *batch)} == {"ends"}
    watcher, data = monitor(tmp_path), (batch for _ in range(8))
    arguments = {"callbacks": [watcher], "shuffle": False}
    tuner = tuned(model, data, steps_per_epoch=8, **arguments)
    assert "ends" in {v.layer for v in watcher.verdicts}
    assert "ends" in demoted(tuner)


# A lack of memory is not the fault of a layer.


def out_of_memory():
    if BACKEND == "torch":
        import torch

        return torch.OutOfMemoryError("CUDA out of memory")
    if BACKEND == "tensorflow":
        import tensorflow as tf

        message = "OOM when allocating"
        return tf.errors.ResourceExhaustedError(None, None, message)
    import jax

    return jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")


def exhausting(dtype):
    def exhaust(x):
        """Raises as a device without room for what a dtype needs."""
        if keras.backend.standardize_dtype(x.dtype) == dtype:
            raise out_of_memory()
        return x * 1.0

    return exhaust


def large(dtype, **arguments):
    own = Own(lambda x: x * 1.0)
    model = compiled(model_of(own, dense(1), shape=(4,), **arguments))
    own.function = exhausting(dtype)
    return model


@pytest.mark.parametrize(
    "run",
    [
        lambda: kmp.diagnose(large("float16"), *ONES),
        lambda: kmp.diagnose(large("float16"), ONES[0]),
        lambda: kmp.minimize_float32(large("float16"), *ONES, verbose=0),
    ],
    ids=["layer", "prediction", "search"],
)
def test_no_layer_is_blamed_for_a_lack_of_memory(run):
    with pytest.raises(MemoryError, match="out of memory"):
        run()


@pytest.mark.long
def test_training_goes_on_without_the_diagnosis(tmp_path):
    # There is room for float16, and none for the float32 it is compared with.
    model, watcher = large("float32"), kmp.MixPrecMonitor(tmp_path, verbose=0)
    with pytest.warns(UserWarning, match="out of memory"):
        tuned(model, *ONES, 1, callbacks=[watcher])
    assert watcher.verdicts == []
    assert model.optimizer.iterations > 4


class Root(layers.Layer):
    def call(self, x):
        squares = ops.square(x * 300.0)
        return ops.sqrt(squares)


def of_log(y, p):
    return ops.mean(y - ops.log(0 * p))


def never(y, p):
    return ops.mean(y + 1e30 * p * 1e30)


@pytest.mark.parametrize(
    ("layer", "loss", "line"),
    [
        (Root, "mse", "squares = ops.square(x * 300.0)"),
        (functools.partial(layers.Rescaling, 1e9), "mse", None),
        (layers.Identity, of_log, "return ops.mean(y - ops.log(0 * p))"),
        (layers.Identity, never, "return ops.mean(y + 1e30 * p * 1e30)"),
    ],
)
def test_the_line_of_the_users_code_is_named(layer, loss, line):
    model = model_of(layer, dense(1), shape=(4,))
    model.compile(loss=loss, jit_compile=False)
    verdict, *_ = kmp.diagnose(model, *ONES)
    code = verdict.numbers.get("code")
    assert (code and code.partition(": ")[2]) == line
    assert not code or code.startswith("test_diagnosis.py:")
