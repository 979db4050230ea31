"""A gradient or a state that is wrong has a cause that is named."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from zoo.own_step import OwnStep

import keras_mixprec as kmp

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(32, 8)).astype("float32")
Y = RANDOM.integers(0, 3, 32)


def found(
    model,
    x=X,
    y=Y,
    loss=None,
    wide=("head",),
    policy="mixed_float16",
    **optimizing,
):
    rules = [kmp.PrecisionRule(name) for name in wide]
    kmp.apply_policy(model, policy, rules=rules)
    loss = loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = kmp.LossScaleOptimizer("adam", **optimizing)
    model.compile(optimizer, loss, jit_compile=False)
    verdicts = kmp.diagnose(model, x, y)
    named = [(v.layer, v.kind, v.direction) for v in verdicts]
    return [name for name in named if name[1] != "scale_search"]


def model_of(*parts, kind=keras.Model):
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((8,))
    for part in parts:
        x = part(x)
    return kind(inputs, layers.Dense(3, name="head")(x))


class Square(layers.Layer):
    def call(self, x):
        return ops.square(x)


def test_an_overflow_behind_a_layer_that_saturates():
    # tanh of infinity is 1, and its derivative in float32 is 0: only the
    # gradients of the real step are NaN.
    tanh = layers.Dense(8, "tanh", name="tanh")
    model = model_of(layers.Dense(8), Square(name="square"), tanh)
    named = found(model, 500 * X)
    assert ("square", "forward_overflow", "forward") in named
    assert {layer for layer, *_ in named} == {"square", "tanh"}


@pytest.mark.parametrize("start", [1000, 3000])
def test_a_rounding_that_a_later_layer_magnifies(start):
    # 3001 becomes 3000, and less 3008 is off by a seventh. A loss of 1e6, of
    # targets that nothing is learned of yet, does not show it.
    position = layers.Rescaling(1.0, name="position")
    local = layers.Rescaling(1.0, -start - 8, name="local")
    x = start + RANDOM.integers(0, 16, (32, 8)).astype("float32")
    y = np.full((32, 3), 1000.0, "float32")
    model = model_of(position, local)
    named = found(model, x, y, loss="mse", wide=("local", "head"))
    culprit = ("position", "precision_loss", "forward")
    assert named == ([culprit] if start == 3000 else [])


class Squash(layers.Layer):
    """The log-probability of an action that tanh squashes."""

    def call(self, x):
        a = ops.tanh(x)
        penalty = 0.01 * ops.mean(ops.log(1 - a * a + 1e-6))
        self.add_loss(ops.cast(penalty, "float32"))
        return a


class Spread(layers.Layer):
    """Distances of rows, those of a row to itself masked."""

    def call(self, x):
        apart = ops.expand_dims(x, 0) - ops.expand_dims(x, 1)
        # 1e-12 is 0 in float16, and the derivative of the root infinite.
        distance = ops.sqrt(ops.sum(apart * apart, -1) + 1e-12)
        self.add_loss(-0.01 * ops.cast(ops.mean(distance), "float32"))
        return x


@pytest.mark.parametrize("layer", [Squash, Spread])
def test_the_gradients_of_an_added_loss(layer):
    # What the root's gradient is called differs: JAX multiplies by its
    # reciprocal, so that no operand is 0 where it becomes infinite.
    [(path, _, direction)] = found(
        model_of(layers.Dense(8), layer(name="adds")), 4 * X
    )
    assert (path, direction) == ("adds", "backward")


def spread(x):
    apart = ops.expand_dims(x, 0) - ops.expand_dims(x, 1)
    distance = ops.sqrt(ops.sum(apart * apart, -1) + 1e-12)
    return -0.01 * ops.cast(ops.mean(distance), "float32")


def activities(penalty):
    dense = layers.Dense(8, name="dense", activity_regularizer=penalty)
    return found(model_of(dense), 4 * X)


def test_the_gradients_of_an_activity_regularizer():
    # Which its layer adds as a loss, here a finite one.
    [(path, _, direction)] = activities(spread)
    assert (path, direction) == ("dense", "backward")


@pytest.mark.parametrize("factor", [1, 1000])
def test_a_regularizer_that_overflows_is_told_from_its_layer(factor):
    dense = layers.Dense(
        64, kernel_initializer="ones", activity_regularizer="l2", name="dense"
    )
    model = model_of(dense)
    kmp.apply_policy(model, "mixed_float16", rules=[])
    model.compile(kmp.LossScaleOptimizer("adam"), "mse", jit_compile=False)
    x = np.full((8, 8), 100.0 * factor, "float32")
    verdict = kmp.diagnose(model, x, np.ones((8, 3)))[0]
    assert verdict.kind in ("forward_overflow", "cast_overflow")
    assert verdict.layer == "dense"
    assert ("`activity_regularizer`" in verdict.advice) == (factor == 1)


def test_a_sound_activity_regularizer():
    # TensorFlow does not add the float16 that Keras' own returns.
    refused = keras.backend.backend() == "tensorflow"
    expected = [("dense", "unsupported", None)] if refused else []
    assert activities("l2") == expected


class Penalized(layers.Layer):
    def call(self, x):
        self.add_loss(0.01 * ops.cast(ops.mean(ops.square(x)), "float32"))
        return x


def test_a_sound_added_loss_is_nobodys_fault():
    assert found(model_of(layers.Dense(8), Penalized())) == []


# Keras puts a product in place of the kernel, which on torch is no leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_a_vector_that_is_kept_from_step_to_step():
    # Keras assigns it in the call of a float16 layer, which torch loses.
    normalized = layers.SpectralNormalization(layers.Dense(8), name="unit")
    lost = keras.backend.backend() == "torch"
    expected = [("unit", "precision_loss", "update")] if lost else []
    assert found(model_of(normalized)) == expected


class Root(layers.Layer):
    def call(self, x):
        # At 0 the derivative is infinite, and times 0 no number.
        return ops.sqrt(ops.square(x))


def test_gradients_that_float32_has_not_either_are_no_matter_of_precision():
    model = model_of(layers.Dense(8, kernel_initializer="zeros"), Root())
    assert found(model) == [(None, "divergence", None)]


class OwnLoss(keras.Model):
    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        narrow = ops.cast(y_pred, self.compute_dtype)
        return 1e-6 * ops.cast(ops.mean(ops.square(300 * narrow)), "float32")


def test_code_outside_of_layers():
    model = model_of(layers.Dense(8), kind=OwnLoss)
    [(layer, kind, _)] = found(model, 10 * X)
    assert (layer, kind) == ("<model>", "forward_overflow")
    [verdict] = kmp.diagnose(model, 10 * X, Y)
    assert "`compute_loss` or `train_step`" in verdict.advice


class Average(layers.Layer):
    """A moving average of its inputs, by hand."""

    def __init__(self, momentum, **kwargs):
        super().__init__(**kwargs)
        self.momentum = momentum

    def build(self, input_shape):
        shape = input_shape[-1:]
        self.mean = self.add_weight(
            shape, "zeros", trainable=False, autocast=False
        )

    def call(self, x):
        mean = ops.cast(self.mean, x.dtype)
        new = self.momentum * mean + (1 - self.momentum) * ops.mean(x, 0)
        self.mean.assign(new)
        return x


@pytest.mark.parametrize("momentum", [0.9, 0.999])
def test_a_moving_average_that_stands_still(momentum):
    model = model_of(layers.Dense(8), Average(momentum, name="average"))
    stands = [("average", "precision_loss", "update")]
    assert found(model, X + 2) == (stands if momentum == 0.999 else [])
    assert not np.any(model.get_layer("average").mean.numpy())


@pytest.mark.parametrize("momentum", [0.5, 0.99])
def test_a_moving_average_that_stands_still_in_bfloat16(momentum):
    # 0.99 is 0.98828 there: it resolves a seventh below the mean.
    model = model_of(layers.Dense(8), Average(momentum, name="average"))
    stands = [("average", "precision_loss", "update")]
    named = found(model, X + 2, policy="mixed_bfloat16")
    assert named == (stands if momentum == 0.99 else [])


class Counter(layers.Layer):
    def __init__(self, autocast=False, **kwargs):
        super().__init__(**kwargs)
        self.casts = autocast

    def build(self, input_shape):
        self.rows = self.add_weight(
            (), "zeros", trainable=False, autocast=self.casts
        )

    def call(self, x):
        self.rows.assign(ops.cast(self.rows, x.dtype) + 1)
        return x


@pytest.mark.parametrize(
    ("policy", "rows", "stands"),
    [
        ("mixed_float16", 1000.0, False),
        ("mixed_float16", 2048.0, True),
        ("mixed_bfloat16", 100.0, False),
        ("mixed_bfloat16", 256.0, True),
    ],
)
def test_a_counter_that_stands_still(policy, rows, stands):
    # float16 counts to 2048, bfloat16 to 256.
    model = model_of(layers.Dense(8), Counter(name="counter"))
    model.get_layer("counter").rows.assign(rows)
    named = [("counter", "precision_loss", "update")]
    assert found(model, policy=policy) == (named if stands else [])


def test_what_torch_does_not_assign_is_found():
    model = model_of(layers.Dense(8), Counter(autocast=True, name="counter"))
    named = found(model)
    advice = [v.advice for v in kmp.diagnose(model, X, Y)]
    model.fit(X, Y, batch_size=len(X), verbose=0)
    counted = model.get_layer("counter").rows.numpy() == 1
    assert counted == (keras.backend.backend() != "torch")
    assert named == (
        [] if counted else [("counter", "precision_loss", "update")]
    )
    assert counted or "assigns to 'counter/variable" in advice[0]


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_moving_average_in_float32_is_sound(policy):
    model = model_of(layers.Dense(8), layers.BatchNormalization())
    assert found(model, X + 2, policy=policy) == []


@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow",
    reason="elsewhere no loss takes the logits of an output",
)
@pytest.mark.parametrize(("size", "named"), [(1, []), (30, ["probabilities"])])
def test_a_loss_that_loses_the_logits_of_a_16_bit_softmax(size, named):
    # In float32 it is computed from logits, of a 16-bit output from
    # probabilities, which are cut off at 1e-7.
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")
    head = layers.Dense(3, "softmax", name="probabilities")
    model = keras.Sequential([keras.Input((8,)), layers.Dense(16), head])
    loss = "sparse_categorical_crossentropy"
    optimizer = kmp.LossScaleOptimizer("adam", initial_scale=1.0)
    model.compile(optimizer, loss, jit_compile=False)
    assert [v.layer for v in kmp.diagnose(model, size * X, Y)] == named


class Direction(layers.Layer):
    def call(self, x):
        return x / ops.sqrt(ops.sum(x * x, axis=-1, keepdims=True) + 1e-6)


class OfPairs(keras.Model):
    """Of two rows of samples, one loss: the batch is no input of the model.

    Keras makes a functional model of the base of what is given a graph, which
    other models have `OwnStep` for.
    """

    train_step, scaled = OwnStep.train_step, OwnStep.scaled

    def loss_of(self, pairs, y):
        first, second = self(pairs[0]), self(pairs[1])
        loss = ops.mean(ops.square(first - second))
        return loss, {"loss": loss}


@pytest.mark.parametrize(
    ("scale", "expected"),
    [(1, []), (400, [("direction", "forward_overflow", "forward")])],
)
def test_a_step_that_takes_the_batch_apart(scale, expected):
    pairs = scale * RANDOM.normal(size=(2, 32, 8)).astype("float32")
    model = model_of(Direction(name="direction"), kind=OfPairs)
    assert found(model, pairs, np.zeros(2)) == expected
