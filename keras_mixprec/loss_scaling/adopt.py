"""Our optimizer in the place of Keras' own, with its state."""

import keras

from keras_mixprec.loss_scaling.dynamic import DynamicLossScale
from keras_mixprec.loss_scaling.optimizer import LossScaleOptimizer


@keras.saving.register_keras_serializable("keras_mixprec")
class _Adopted(LossScaleOptimizer):
    """What `adopt` returns: saved twice, since Keras' own reads it twice."""

    def _check_update(self, variables):
        """Lets pass what Keras' own lets pass: a monitor changes no run."""

    def __dir__(self):
        return [*super().__dir__(), "inner_optimizer"]


def adopt(
    optimizer: keras.optimizers.LossScaleOptimizer,
    rule: DynamicLossScale | None = None,
) -> LossScaleOptimizer:
    """Returns an optimizer that goes on where Keras' own is.

    It shares the inner optimizer, the loss scale and the
    step counter with `optimizer`, and is saved as Keras saves it. It differs
    where Keras' would lose weights: a scale of 0 or infinity, and non-finite
    rows of a sparse gradient or of another replica.

    Args:
        optimizer: A `keras.optimizers.LossScaleOptimizer`, built or not.
        rule: The update rule. Defaults to `None`, the one of `optimizer`.

    Returns:
        A `LossScaleOptimizer`; `optimizer` itself if it is one already.
    """
    if isinstance(optimizer, LossScaleOptimizer):
        return optimizer
    own_rule = DynamicLossScale.preset(
        "keras",
        initial_scale=optimizer.initial_scale,
        growth_interval=optimizer.dynamic_growth_steps,
    )
    adopted = _Adopted(
        optimizer.inner_optimizer,
        loss_scale=rule or own_rule,
        name=optimizer.name,
    )
    if optimizer.built:
        adopted.build(optimizer._trainable_variables, shared=optimizer)
    return adopted
