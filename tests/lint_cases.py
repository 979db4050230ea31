"""Models that each rule of lint must find something in, and must not.

An example returns a model, `(model, x)` or `(model, x, y)`, with a dict of
further arguments of `lint` last if there are any, and names the rule that it
belongs to; `test_lint_rules.py` runs over all of them. `products` in the dict
is the matmul precision that is set, and the device an H100.
"""

import keras
import numpy as np
from keras import layers, ops

import keras_mixprec as kmp

FINDS, PASSES = {}, {}


def finds(rule, layer=None, severity=None):
    """Registers an example in which `rule` must name `layer`.

    Args:
        rule: String, the name of the rule.
        layer: Path, `None` where the finding is of no layer.
        severity: Of that finding; by default the rule's own.
    """

    def register(build):
        FINDS.setdefault(rule, []).append((build, layer, severity))
        return build

    return register


def passes(*rules):
    """Registers an example in which none of these rules finds anything."""

    def register(build):
        for rule in rules:
            PASSES.setdefault(rule, []).append(build)
        return build

    return register


def float16(model, policy="mixed_float16"):
    """Sets every layer, without the rules that keep some in float32."""
    kmp.apply_policy(model, policy, rules=[])
    return model


def between(layer, shape=(4,), policy="mixed_float16"):
    """A model of one layer and a head, in 16 bits."""
    inputs = keras.Input(shape)
    x = layers.Flatten()(layer(inputs))
    return float16(keras.Model(inputs, layers.Dense(8, name="head")(x)), policy)


def mlp(*units, size=64, policy="mixed_float16", **arguments):
    """Dense layers `d0`, `d1` ... in 16 bits."""
    inputs = x = keras.Input((size,))
    for index, count in enumerate(units):
        x = layers.Dense(count, name=f"d{index}", **arguments)(x)
    return float16(keras.Model(inputs, x), policy)


def compiled(model, optimizer, **arguments):
    model.compile(optimizer, "mse", auto_scale_loss=False, **arguments)
    return model


def samples(count=8, size=64, scale=1.0):
    random = np.random.default_rng(0)
    return (scale * random.normal(size=(count, size))).astype("float32")


# Sizes.


@finds("dimension_not_multiple_of_8", "d0")
def hidden_size_of_100():
    return mlp(100, 8)


@finds("dimension_not_multiple_of_8", "d1", "low")
def head_of_ten_classes():
    return mlp(256, 10, size=256)


@passes("dimension_not_multiple_of_8")
def hidden_size_of_104():
    return mlp(104, 8)


@passes("dimension_not_multiple_of_8", "no_loss_scaling")
def hidden_size_of_100_in_float32():
    return compiled(mlp(100, 10, policy="float32"), "adam")


@finds("dimension_not_multiple_of_8", "d0")
def quantized_size_of_24():
    model = mlp(24, 16, policy="float32")
    model.get_layer("d0").quantize("int8")
    return model


@passes("dimension_not_multiple_of_8")
def quantized_size_of_32():
    model = mlp(32, 16, policy="float32")
    model.get_layer("d0").quantize("int8")
    return model


@finds("products_too_small")
def sides_of_32():
    return mlp(32, 32, size=32)


@passes("products_too_small", "little_work_in_16_bits", "casts_cost_more")
def sides_of_64():
    return mlp(1024, 1024, 8, size=512)


# Casts.


@finds("no_16_bit_layers")
def all_in_float32():
    return mlp(8, policy="float32")


@passes("no_16_bit_layers")
def all_in_bfloat16():
    return mlp(8, policy="mixed_bfloat16")


class NotBuilt(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner = layers.Dense(8)

    def call(self, x):
        return self.inner(x)


@finds("not_traced")
def model_that_is_not_built():
    return float16(NotBuilt())


@passes("not_traced")
def model_that_is_built_from_samples():
    return float16(NotBuilt()), samples(8, 4)


@finds("little_work_in_16_bits")
def wide_layer_in_float32():
    model = mlp(512, 8)
    kmp.apply_policy(model, "mixed_float16", rules=[kmp.PrecisionRule("d0")])
    return model


@finds("casts_cost_more")
def small_layers_in_turns():
    model = mlp(8, 8, 8, 8, 8, size=8)
    wide = [kmp.PrecisionRule(name) for name in ("d0", "d2", "d4")]
    kmp.apply_policy(model, "mixed_float16", rules=wide)
    return model


@finds("dtype_bounces", "scale")
def rescaling_between_float32():
    inputs = keras.Input((64,))
    x = layers.Dense(64, name="d0")(inputs)
    x = layers.Rescaling(0.5, name="scale")(x)
    x = layers.Dense(64, name="d1")(x)
    model = keras.Model(inputs, x)
    model.get_layer("scale").dtype_policy = "mixed_float16"
    return model


@passes("dtype_bounces")
def rescaling_between_float16():
    inputs = keras.Input((64,))
    x = layers.Dense(64, name="d0")(inputs)
    x = layers.Rescaling(0.5, name="scale")(x)
    return float16(keras.Model(inputs, layers.Dense(64, name="d1")(x)))


class Block(layers.Layer):
    """A block of the user's that may hand its dtype on."""

    def __init__(self, hands_on, **arguments):
        super().__init__(**arguments)
        dtype = self.dtype_policy if hands_on else None
        self.inner = layers.Dense(8, dtype=dtype, name="inner")

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        return self.inner(x)


def with_block(hands_on):
    keras.config.set_dtype_policy("mixed_float16")
    inputs = keras.Input((8,))
    x = Block(hands_on, dtype="float32", name="block")(inputs)
    return keras.Model(inputs, x)


@finds("wrapper_dtype_ignored", "block")
def block_that_keeps_its_dtype():
    return with_block(hands_on=False)


@passes("wrapper_dtype_ignored")
def block_that_hands_its_dtype_on():
    return with_block(hands_on=True)


@passes("wrapper_dtype_ignored")
def bidirectional_in_float16():
    return between(layers.Bidirectional(layers.LSTM(8)), (5, 8))


# Numbers that layers hold.


@finds("argument_beyond_format", "bytes")
def scale_of_a_billionth():
    return between(layers.Rescaling(1e-9, name="bytes"))


@finds("argument_beyond_format", "offset")
def offset_of_a_million():
    return between(layers.Rescaling(1.0, 1e6, name="offset"))


@passes("argument_beyond_format")
def scale_of_a_255th():
    return between(layers.Rescaling(1 / 255, -1, name="bytes"))


@passes("argument_beyond_format")
def scale_of_a_billionth_in_bfloat16():
    return between(layers.Rescaling(1e-9), policy="mixed_bfloat16")


@passes("argument_beyond_format")
def bounds_that_do_no_harm():
    inputs = keras.Input((4,), dtype="int32")
    x = layers.Flatten()(layers.Embedding(99100, 4)(inputs))
    return float16(keras.Model(inputs, layers.ReLU(max_value=1e9)(x)))


@passes("argument_beyond_format")
def norm_of_bert():
    return between(layers.LayerNormalization(epsilon=1e-12))


@finds("weights_beyond_format", "d0")
def weights_of_a_million():
    model = mlp(8, 8)
    model.get_layer("d0").kernel.assign(np.full((64, 8), 1e6))
    return model


@finds("weights_beyond_format", "d0")
def weights_of_a_billionth():
    model = mlp(8, 8)
    model.get_layer("d0").kernel.assign(np.full((64, 8), 1e-9))
    return model


@passes("weights_beyond_format")
def usual_weights():
    return mlp(8, 8)


@passes("weights_beyond_format")
def large_moving_variance():
    model = between(layers.BatchNormalization(name="bn"))
    model.get_layer("bn").moving_variance.assign(np.full(4, 1e6))
    return model


@finds("normalization_statistics", "dates")
def days_since_1970():
    norm = layers.Normalization(mean=19706.0, variance=85.0, name="dates")
    return between(norm)


@finds("normalization_statistics", "prices")
def prices_in_yen():
    norm = layers.Normalization(mean=2e5, variance=4e8, name="prices")
    return between(norm)


@passes("normalization_statistics")
def years():
    norm = layers.Normalization(mean=2010.0, variance=130.0)
    return between(norm)


# Layers and losses.


@finds("sensitive_layer", "norm")
def unit_normalization():
    return between(layers.UnitNormalization(name="norm"))


@passes("sensitive_layer")
def layer_normalization():
    return between(layers.LayerNormalization(name="norm"))


@finds("output_in_16_bits", "d1")
def softmax_in_float16():
    model = mlp(16, 8)
    model.get_layer("d1").activation = keras.activations.softmax
    return model


@finds("output_in_16_bits", "d1", "low")
def logits_in_float16():
    return mlp(16, 8)


class Subclassed(keras.Model):
    """Which of its layers makes its output only its operations tell."""

    def __init__(self):
        super().__init__()
        self.head = layers.Dense(8, name="head")
        self.body = layers.Dense(16, name="body")

    def call(self, x):
        return self.head(self.body(x))


@finds("output_in_16_bits", "head", "low")
def logits_of_a_subclassed_model():
    model = Subclassed()
    model(np.zeros((1, 4)))
    return float16(model)


@passes("output_in_16_bits")
def subclassed_model_with_its_head_in_float32():
    model = Subclassed()
    model(np.zeros((1, 4)))
    kmp.apply_policy(model, "mixed_float16", rules=[kmp.PrecisionRule("head")])
    return model


@passes("output_in_16_bits")
def output_by_the_default_rules():
    model = mlp(16, 8)
    kmp.apply_policy(model, "mixed_float16")
    return model


@finds("activity_regularizer_in_16_bits", "d0")
def large_activity_regularizer():
    return mlp(4096, activity_regularizer="l2")


@finds("activity_regularizer_in_16_bits", "d0", "medium")
def small_activity_regularizer():
    return mlp(16, activity_regularizer="l2")


@passes("activity_regularizer_in_16_bits", "weight_regularizer_in_16_bits")
def weight_decay_in_float32():
    return mlp(16, kernel_regularizer="l2")


def pure(dtype, **arguments):
    keras.config.set_dtype_policy(dtype)
    inputs = keras.Input((64,))
    x = layers.Dense(64, name="d0", **arguments)(inputs)
    return keras.Model(inputs, layers.Dense(8, name="d1")(x))


@finds("weight_regularizer_in_16_bits", "d0")
def weight_decay_of_large_float16():
    large = keras.initializers.Constant(8.0)
    return pure("float16", kernel_regularizer="l2", kernel_initializer=large)


@finds("loss_in_16_bits")
def loss_with_dtype():
    model = mlp(8, 8)
    model.compile("sgd", keras.losses.MeanSquaredError(dtype="float16"))
    return model


@passes("loss_in_16_bits")
def usual_loss():
    return compiled(mlp(8, 8), "sgd")


# Optimizer.


@finds("variables_in_16_bits")
def pure_bfloat16():
    return pure("bfloat16")


@passes("variables_in_16_bits")
def mixed_bfloat16():
    return pure("mixed_bfloat16")


@finds("epsilon_of_the_optimizer")
def adam_in_pure_float16():
    return compiled(pure("float16"), keras.optimizers.Adam(epsilon=1e-8))


@passes("epsilon_of_the_optimizer")
def adam_in_mixed_float16():
    return compiled(mlp(8), keras.optimizers.Adam(epsilon=1e-8))


@finds("beta_of_the_optimizer")
def adam_in_pure_bfloat16():
    return compiled(pure("bfloat16"), keras.optimizers.Adam())


@passes("beta_of_the_optimizer")
def adam_with_a_beta_of_two_digits():
    return compiled(pure("bfloat16"), keras.optimizers.Adam(beta_2=0.99))


@finds("no_loss_scaling")
def plain_adam():
    return compiled(mlp(8), "adam")


@passes("no_loss_scaling", "needless_loss_scaling", "accumulation_with_skips")
def scaled_adam():
    return compiled(mlp(8), kmp.LossScaleOptimizer("adam"))


@finds("needless_loss_scaling")
def scaled_bfloat16():
    model = mlp(8, policy="mixed_bfloat16")
    return compiled(model, kmp.LossScaleOptimizer("adam"))


@finds("constant_loss_scale")
def factor_of_1024():
    return compiled(mlp(8), keras.optimizers.SGD(loss_scale_factor=1024.0))


@passes("constant_loss_scale")
def fixed_scale_of_1024():
    return compiled(mlp(8), kmp.LossScaleOptimizer("sgd", 1024.0))


class Stepping(keras.Model):
    """A step of the user's own, as far as lint reads it."""

    def scaled(self, loss):
        return loss

    def train_step(self, data):
        x, y = data
        loss = self.scaled(ops.mean(ops.square(self(x) - y)))
        loss.backward()
        variables = self.trainable_variables
        gradients = [v.value.grad for v in variables]
        self.optimizer.apply(self.clipped(gradients), variables)
        return {"loss": loss}

    def clipped(self, gradients):
        return gradients


class Scaling(Stepping):
    def scaled(self, loss):
        return self.optimizer.scale_loss(loss)


class Clipping(Scaling):
    def clipped(self, gradients):
        return keras.utils.clip_by_norm(gradients)


class Deferring(keras.Model):
    """A step of the user's own that leaves the work to Keras."""

    def train_step(self, *arguments):
        return super().train_step(*arguments)


def stepping(kind):
    inputs = keras.Input((8,))
    model = float16(kind(inputs, layers.Dense(8)(inputs)))
    return compiled(model, kmp.LossScaleOptimizer("sgd"))


@finds("scale_loss_never_called")
def step_that_forgets_it():
    return stepping(Stepping)


@passes("scale_loss_never_called", "clipping_before_unscaling")
def step_that_calls_it():
    return stepping(Scaling)


@passes("scale_loss_never_called")
def step_that_defers():
    return stepping(Deferring)


@finds("clipping_before_unscaling")
def step_that_clips():
    return stepping(Clipping)


@finds("loss_scale_without_floor")
def scaling_of_keras():
    inner = keras.optimizers.SGD()
    return compiled(mlp(8), keras.optimizers.LossScaleOptimizer(inner))


@passes("loss_scale_without_floor")
def scaling_of_ours():
    return compiled(mlp(8), kmp.LossScaleOptimizer("sgd"))


def with_callbacks(*callbacks):
    return scaling_of_ours(), {"callbacks": list(callbacks)}


@finds("callbacks_that_read_the_loss")
def terminating_on_nan():
    return with_callbacks(keras.callbacks.TerminateOnNaN())


@finds("callbacks_that_read_the_loss", severity="low")
def stopping_by_the_training_loss():
    return with_callbacks(keras.callbacks.EarlyStopping("loss"))


@passes("callbacks_that_read_the_loss")
def stopping_by_the_validation_loss():
    return with_callbacks(keras.callbacks.EarlyStopping("val_loss"))


@passes("callbacks_that_read_the_loss")
def terminating_on_nan_with_a_monitor():
    monitor = kmp.MixPrecMonitor(verbose=0)
    return with_callbacks(keras.callbacks.TerminateOnNaN(), monitor)


@finds("accumulation_with_skips")
def accumulating():
    inner = keras.optimizers.SGD(gradient_accumulation_steps=4)
    return compiled(mlp(8), kmp.LossScaleOptimizer(inner))


@finds("ema_of_few_digits")
def average_of_bfloat16():
    inner = keras.optimizers.SGD(use_ema=True)
    return compiled(pure("bfloat16"), inner)


@passes("ema_of_few_digits")
def average_of_float32():
    inner = keras.optimizers.SGD(use_ema=True)
    return compiled(pure("mixed_bfloat16"), inner)
