"""Each default rule: the hazard is real in float16, and the rule cures it."""

import keras
import numpy as np
import pytest
from keras import layers, ops

from keras_mixprec import DEFAULT_RULES, PrecisionRule, apply_policy


class UserNorm(layers.Layer):
    def call(self, x):
        mean_square = ops.sum(x * x, axis=-1, keepdims=True) / x.shape[-1]
        return x / ops.sqrt(mean_square + 1e-6)


def attention(x):
    return layers.Attention()([x, x])


def cosine(x):
    return layers.Dot(axes=1, normalize=True)([x, x])


def operation(name, *arguments):
    function = getattr(ops, name)
    return lambda x: function(layers.Identity()(x), *arguments)


def model_of(make, shape, output=layers.Identity):
    """A model in which the layer is not the output, so one rule decides.

    The layer behind it is given a name, and the test keeps it in float32: its
    cast to float16 is another layer's hazard.
    """
    inputs = keras.Input(shape)
    return keras.Model(inputs, output(name="after")(make(inputs)))


def run(model, value):
    shape = (1, *model.input_shape[1:])
    return ops.convert_to_numpy(
        ops.cast(model(np.full(shape, value, "float32")), "float32")
    )


def dense_exp(x):
    return layers.Dense(1, kernel_initializer="ones", activation="exponential")(
        x
    )


HAZARDS = {
    "user norm": (lambda x: UserNorm()(x), (16,), 400.0),
    "exponential": (dense_exp, (1,), 12.0),
    "squareplus": (layers.Activation("squareplus"), (1,), 300.0),
    "Normalization": (
        lambda x: layers.Normalization(mean=1e5, variance=1e10)(x),
        (1,),
        2e5,
    ),
    "Rescaling": (lambda x: layers.Rescaling(1 / 65536)(x), (1,), 65536.0),
    "UnitNormalization": (
        lambda x: layers.UnitNormalization()(x),
        (16,),
        300.0,
    ),
    "UnitNormalization of zeros": (
        lambda x: layers.UnitNormalization()(x),
        (16,),
        0.0,
    ),
    "Dot": (cosine, (16,), 300.0),
    "Attention": (attention, (4, 64), 40.0),
    "exp": (operation("exp"), (1,), 12.0),
    "exp2": (operation("exp2"), (1,), 17.0),
    "expm1": (operation("expm1"), (1,), 12.0),
    "log": (operation("log"), (1,), 1e-9),
    "log2": (operation("log2"), (1,), 1e-9),
    "log10": (operation("log10"), (1,), 1e-9),
    "power": (operation("power", 3), (1,), 50.0),
    "square": (operation("square"), (1,), 300.0),
    "reciprocal": (operation("reciprocal"), (1,), 1e-5),
    "rsqrt": (operation("rsqrt"), (1,), 1e-9),
    "sum": (operation("sum", 1), (400,), 300.0),
    "prod": (operation("prod", 1), (4,), 50.0),
    "cumsum": (operation("cumsum", 1), (400,), 300.0),
}
if keras.backend.backend() != "torch":  # which takes the norm in float32
    HAZARDS["norm"] = (operation("norm"), (16,), 300.0)


@pytest.mark.parametrize("hazard", HAZARDS)
def test_the_hazard_is_real_and_the_rule_repairs_it(hazard):
    make, shape, value = HAZARDS[hazard]
    model = model_of(make, shape)
    exact = run(model, value)
    apply_policy(model, "mixed_float16", rules=[])
    model.get_layer("after").dtype_policy = "float32"
    assert not np.allclose(run(model, value), exact, rtol=0.1)
    plan = apply_policy(model, "mixed_float16")
    model.get_layer("after").dtype_policy = "float32"
    assert np.allclose(run(model, value), exact, rtol=0.01)
    assert set(plan.reasons.values()) <= {r.reason for r in DEFAULT_RULES}


LOOKUPS = {
    "Discretization": lambda: layers.Discretization([2048.5, 1e5]),
    "CategoryEncoding": lambda: layers.CategoryEncoding(3000, "one_hot"),
    "counts": lambda: layers.CategoryEncoding(3000, "count"),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_raw_numbers_that_are_looked_up(name):
    """Lookups and `Hashing` take integers as they are, and need no rule."""
    after = layers.Dense(1, name="after")
    if name == "Discretization":
        after = layers.Embedding(3, 1, name="after")
    inputs = keras.Input((1,), dtype="int32")
    model = keras.Model(inputs, after(LOOKUPS[name]()(inputs)))
    x = np.array([[2047], [2049]], "int32")
    exact = model.predict(x, verbose=0)
    if keras.backend.backend() == "tensorflow" and name != "counts":
        apply_policy(model, "mixed_float16", rules=[PrecisionRule("after")])
        assert not np.array_equal(model.predict(x, verbose=0), exact)
    plan = apply_policy(model, "mixed_float16")
    np.testing.assert_array_equal(model.predict(x, verbose=0), exact)
    assert any("2049 becomes" in reason for reason in plan.reasons.values())


def test_a_rounded_probability_at_the_output():
    inputs = keras.Input((2,))
    model = keras.Model(inputs, layers.Softmax()(inputs))
    x = np.array([[20.0, 0.0]], "float32")
    exact = ops.convert_to_numpy(model(x))
    apply_policy(model, "mixed_float16", rules=[])
    assert ops.convert_to_numpy(model(x))[0, 1] == 0.0
    apply_policy(model, "mixed_float16")
    assert np.array_equal(ops.convert_to_numpy(model(x)), exact)


def test_an_activity_loss():
    regularized = layers.Dense(
        2, kernel_initializer="ones", activity_regularizer="l2"
    )
    model = keras.Sequential([keras.Input((100,)), regularized, layers.ReLU()])
    x = np.full((1, 100), 6.0, "float32")
    losses = {}
    for rules in ([], None):
        apply_policy(model, "mixed_float16", rules=rules)
        model(x)
        losses[rules is None] = float(ops.convert_to_numpy(model.losses[0]))
    assert not np.isfinite(losses[False])
    assert losses[True] == pytest.approx(0.01 * 2 * 600**2)


@pytest.mark.skipif(
    keras.backend.backend() == "torch", reason="torch sums in float32"
)
def test_a_wide_average():
    model = model_of(lambda x: layers.AveragePooling2D(64)(x), (64, 64, 1))
    apply_policy(model, "mixed_float16", rules=[])
    assert abs(run(model, 3.0) - 3.0).max() > 0.5
    apply_policy(model, "mixed_float16")
    assert abs(run(model, 3.0) - 3.0).max() < 0.01


@pytest.mark.skipif(
    keras.backend.backend() == "torch", reason="torch reads the kernel uncast"
)
# The kernel's norm overflows in JAX's float16, which the first half is about.
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_spectral_normalization_keeps_its_master_weights():
    layer = layers.SpectralNormalization(layers.Dense(3))
    model = keras.Sequential([keras.Input((3,)), layer, layers.ReLU()])
    rounded = {}
    for rules in ([], None):
        apply_policy(model, "mixed_float16", rules=rules)
        model(np.ones((2, 3), "float32"), training=True)
        kernel = ops.convert_to_numpy(layer.layer.kernel.value)
        rounded[rules is None] = (kernel == np.float16(kernel)).all()
    assert rounded == {False: True, True: False}
    assert layer.layer.compute_dtype == "float16"


def outputs_of(model):
    plan = apply_policy(model, "mixed_float16")
    reason = DEFAULT_RULES[0].reason
    return [path for path in plan if plan.reasons.get(path) == reason]


def test_outputs_are_found_behind_layers_that_hand_on():
    stack = [layers.Dense(4), layers.Dense(4, name="head"), layers.Flatten()]
    model = keras.Sequential([keras.Input((4,)), *stack])
    assert outputs_of(model) == ["head", "flatten"]
    assert outputs_of(keras.Model(model.inputs, model.outputs)) == [
        "head",
        "flatten",
    ]


def test_outputs_are_found_behind_operations_and_in_nested_models():
    inputs = keras.Input((4,))
    nested = keras.Sequential([layers.Dense(4), layers.Dense(4)])
    outputs = [nested(inputs) * 2, layers.Dense(1, name="b")(inputs)]
    model = keras.Model(inputs, outputs)
    assert outputs_of(model) == ["sequential/dense_1", "b"]


def test_outputs_of_a_subclassed_model_are_its_softmax_layers():
    class Classifier(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden = layers.Dense(4)
            self.head = layers.Dense(2, activation="softmax")

    assert outputs_of(Classifier()) == ["dense_1"]


@pytest.mark.parametrize(
    "layer",
    [
        layers.LayerNormalization(),
        layers.BatchNormalization(),
        layers.Activation("relu"),
        layers.AdditiveAttention(),
        layers.AveragePooling2D(2),
        layers.Dot(axes=1),
        layers.MultiHeadAttention(1, 1),
    ],
    ids=lambda layer: layer.name,
)
def test_what_is_fine_is_left_in_16_bits(layer):
    model = keras.Sequential([layer, layers.Dense(1)])
    plan = apply_policy(model, "mixed_float16")
    assert list(plan.values())[0] == "mixed_float16"
