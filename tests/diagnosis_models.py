"""Small models with a fault at a known place, and checks of their verdicts."""

import keras
from keras import layers, ops
from zoo.parts import chain

import keras_mixprec as kmp


class Overflowing(layers.Layer):
    def call(self, x):
        return ops.sqrt(ops.square(x * 1000.0)) / 1000.0


class Block(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(8)
        self.bad = Overflowing(name="bad")
        self.drop = layers.Dropout(0.5)

    def build(self, input_shape):
        self.dense.build(input_shape)

    def call(self, x, training=None):
        return x + self.drop(self.bad(self.dense(x)), training=training)


class Direction(layers.Layer):
    """x / |x|, whose sum of squares overflows for numbers above 128."""

    def call(self, x):
        squares = ops.sum(x * x, axis=-1, keepdims=True)
        return x / ops.sqrt(squares + 1e-6)


class Own(layers.Layer):
    """Computes a function of the input and of weights with given values."""

    def __init__(self, function, *values, name="own", **kwargs):
        super().__init__(name=name, **kwargs)
        self.function, self.start = function, values

    def build(self, shape):
        self.held = [self.add_weight(v.shape, "zeros") for v in self.start]
        for weight, value in zip(self.held, self.start, strict=True):
            weight.assign(value)

    def call(self, x):
        return self.function(x, *self.held)


class Adds(Own):
    """Returns the input, and adds a function of the input as a float32 loss."""

    def call(self, x):
        self.add_loss(ops.cast(self.function(x), "float32"))
        return x


class OwnLoss(keras.Model):
    """Computes the loss by the function `of` of the outputs, in their dtype."""

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return ops.mean(ops.cast(self.of(y_pred), "float32"))


def model_of(*parts, shape=(8,), wide=(), seed=0, policy=None, **arguments):
    """Returns a functional model of layers in a row, in float16 but for `wide`.

    The model gets its dtypes after it is made. With `policy` it is made under
    that policy, so the parts must be functions or follow it already.
    """
    keras.utils.set_random_seed(seed)
    if policy:
        keras.config.set_dtype_policy(policy)
        return chain(shape, *parts, **arguments)
    return in_float16(chain(shape, *parts, **arguments), wide)


def in_float16(model, wide=(), policy="mixed_float16"):
    """Gives a model a policy, and layers of some names float32."""
    rules = [kmp.PrecisionRule(name) for name in wide]
    kmp.apply_policy(model, policy, rules=rules)
    return model


LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def compiled(model, loss="mse", optimizer="adam", jit=False, **scaling):
    """Compiles a model; `scaling` are arguments of the loss scale."""
    optimizer = kmp.LossScaleOptimizer(optimizer, **scaling)
    model.compile(optimizer, loss, jit_compile=jit)
    return model


def found(model, *data, **arguments):
    """Returns layer and kind of each verdict."""
    verdicts = kmp.diagnose(model, *data, **arguments)
    return [(verdict.layer, verdict.kind) for verdict in verdicts]


def blamed(model, *data):
    """Returns the layers that a diagnosis names."""
    return [layer for layer, _ in found(model, *data) if layer]


def tuned(model, *data, callbacks=(), **arguments):
    """Trains a model with a tuner, which demotes to float32; returns it."""
    tuner = kmp.PrecisionTuner(verbose=0, bfloat16=False)
    callbacks = [*callbacks, tuner]
    model.fit(*data, verbose=0, callbacks=callbacks, **arguments)
    return tuner


def demoted(tuner):
    """The layers that a tuner has put into float32."""
    return {p for p, policy in tuner.plan.items() if policy == "float32"}


def everything(model):
    """Returns the values of all variables, including the optimizer's."""
    optimizer = getattr(model, "optimizer", None)
    variables = [*model.variables, *getattr(optimizer, "variables", ())]
    return [ops.convert_to_numpy(v.value).copy() for v in variables]
