"""Adds loss scaling to models, or replaces Keras' own loss scaling."""

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
    """Returns the replacement for Keras' own `LossScaleOptimizer`.

    Any other optimizer is returned unchanged.
    """
    if not can_adopt(optimizer):
        return optimizer
    return LossScaleOptimizer.continuing(optimizer)


def can_adopt(optimizer: keras.optimizers.Optimizer) -> bool:
    """Returns whether an optimizer is of Keras' own class, not a subclass."""
    return type(optimizer) is keras.optimizers.LossScaleOptimizer


def ensure_loss_scaling(model: keras.Model) -> keras.optimizers.Optimizer:
    """Wraps a compiled model's optimizer if it needs loss scaling.

    Keras wraps an optimizer only if the model's own policy is named
    `"mixed_float16"`. Some models therefore train without loss scaling: a
    float32 model with float16 layers, a model with a policy map, a pure float16
    model, and a mixed_float16 model that was loaded under a different global
    policy.

    This function changes neither weights nor optimizer state. `model.save`
    writes Keras' own `LossScaleOptimizer` with the current scale, so the file
    loads without keras_mixprec.

    An optimizer that already scales the loss stays, including Keras' own
    `LossScaleOptimizer`. The callbacks of this package replace Keras' own
    optimizer automatically. To replace Keras' own optimizer yourself, call
    `compile(LossScaleOptimizer(model.optimizer.inner_optimizer), ...)`.

    Args:
        model: A compiled `keras.Model`.

    Returns:
        The model's optimizer: a new `LossScaleOptimizer` if a layer computes in
        float16 and nothing scaled the loss, otherwise the previous optimizer.

    Raises:
        TypeError: If `model` is not a Keras model.
        ValueError: If `model` is not compiled with an optimizer, or the dtype
            of a variable rounds the optimizer's epsilon to 0, which makes
            weights NaN.

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
            "`model` has no optimizer yet. Call `model.compile(...)` first. "
            f"Received: model={model.name!r}"
        )
    if not lacks_loss_scaling(model):
        return optimizer
    check_constants(optimizer, model.trainable_variables)
    return _wrapped(model, DynamicLossScale())


def skip_nonfinite_steps(model: keras.Model):
    """Makes an optimizer without loss scaling skip non-finite steps.

    Args:
        model: A compiled `keras.Model`.
    """
    if not _scales_loss(model.optimizer):
        _wrapped(model, FixedLossScale(1.0))


def _wrapped(model, rule):
    # `model.save` stores Keras' own `LossScaleOptimizer`, so that Keras can
    # load the file without keras_mixprec.
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
    # An `InputLayer` computes nothing, so its float16 policy does not matter.
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
