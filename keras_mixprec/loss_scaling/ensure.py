"""Loss scaling for models that have none, or Keras' own."""

import keras

from keras_mixprec._checks import check_type
from keras_mixprec.keras_internals import (
    flat_layers,
    set_saved_optimizer,
)
from keras_mixprec.loss_scaling.constants import check_constants
from keras_mixprec.loss_scaling.optimizer import LossScaleOptimizer
from keras_mixprec.loss_scaling.rules import DynamicLossScale, FixedLossScale


def adopt(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Returns what takes the place of Keras' own `LossScaleOptimizer`.

    Any other optimizer is returned as it is.
    """
    if not can_adopt(optimizer):
        return optimizer
    return LossScaleOptimizer.continuing(optimizer)


def can_adopt(optimizer: keras.optimizers.Optimizer) -> bool:
    """Returns whether `adopt` exchanges it. A subclass stays."""
    return type(optimizer) is keras.optimizers.LossScaleOptimizer


def ensure_loss_scaling(model: keras.Model) -> keras.optimizers.Optimizer:
    """Wraps a compiled model's optimizer if it needs loss scaling.

    Keras wraps an optimizer only if the policy of the model itself is called
    `"mixed_float16"`. A float32 model with float16 layers, a policy map, a
    pure float16 model, and a mixed_float16 model loaded under another global
    policy train without. Weights and optimizer state stay as they are.
    `model.save` writes Keras' own `LossScaleOptimizer`, with the scale reached,
    so that the file loads where keras_mixprec is not installed.

    An optimizer that scales the loss already stays, Keras' own
    `LossScaleOptimizer` included. The callbacks exchange that one
    automatically; `compile(LossScaleOptimizer(model.optimizer.inner_optimizer),
    ...)` does so by hand.

    Args:
        model: A compiled `keras.Model`.

    Returns:
        The optimizer that the model has now: a `LossScaleOptimizer` if a layer
        computes in float16 and nothing scaled the loss, else the previous one.

    Raises:
        TypeError: If `model` is not a Keras model.
        ValueError: If it is not compiled with an optimizer, or an epsilon of
            the optimizer is 0 in the dtype of a variable, which makes weights
            NaN.

    Example:
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    >>> _ = apply_policy(model, "mixed_float16")
    >>> model.compile("sgd", loss="mse")
    >>> wrapper = keras.optimizers.LossScaleOptimizer
    >>> isinstance(ensure_loss_scaling(model), wrapper)
    True
    """
    check_type("model", model, keras.Model, "a `keras.Model`")
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        raise ValueError(
            "`model` has no optimizer yet; call `model.compile(...)` first. "
            f"Received: model={model.name!r}"
        )
    if not lacks_loss_scaling(model):
        return optimizer
    check_constants(optimizer, model.trainable_variables)
    return _wrapped(model, DynamicLossScale())


def skip_nonfinite_steps(model: keras.Model):
    """Lets an optimizer that scales no loss skip steps that are not finite.

    Args:
        model: A compiled `keras.Model`.
    """
    if not _scales_loss(model.optimizer):
        _wrapped(model, FixedLossScale(1.0))


def _wrapped(model, rule):
    # `model.save` stores this one, so that Keras reads the file without this
    # package.
    wrapper = keras.optimizers.LossScaleOptimizer(model.optimizer)
    set_saved_optimizer(model, wrapper)
    model.optimizer = LossScaleOptimizer.continuing(wrapper, rule)
    if model.train_function is not None:
        model.make_train_function(force=True)
    return model.optimizer


def lacks_loss_scaling(model: keras.Model) -> bool:
    """Returns whether a model computes in float16 without loss scaling."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return False
    # An `InputLayer` computes nothing, and keeps the policy it was made under.
    return not _scales_loss(optimizer) and any(
        layer.compute_dtype == "float16"
        for layer in flat_layers(model)
        if not isinstance(layer, keras.layers.InputLayer)
    )


def _scales_loss(optimizer):
    return (
        isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        or optimizer.loss_scale_factor is not None
    )
