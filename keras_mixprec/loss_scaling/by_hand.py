"""Scaling and unscaling in custom training loops."""

import keras
from keras import ops

from keras_mixprec.backend import step as backend_step


class ScalesByHand:
    """Mixin: what a custom training loop calls on the optimizer."""

    def scale_loss(self, loss):
        """Returns the loss in float32, multiplied by the loss scale.

        A float16 loss is cast first: 3.0 times a scale of 2**15 is infinite
        in float16.
        """
        return ops.cast(loss, "float32") * self.loss_scale

    def stateless_scale_loss(self, optimizer_variables, loss):
        """The stateless form of `scale_loss`, for custom loops on JAX.

        Inside a jitted function `scale_loss` would take the scale for a
        constant of the moment of compilation.

        Args:
            optimizer_variables: List of tensors, values of `self.variables`.
            loss: Scalar tensor.

        Returns:
            float32 scalar tensor.
        """
        self._check_built("stateless_scale_loss")
        mapping = list(zip(self.variables, optimizer_variables, strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            return self.scale_loss(loss)

    def unscale(self, gradients):
        """Returns gradients divided by the loss scale, in float32.

        For what has to see true gradients before `apply`, such as clipping
        by hand. The next `apply` takes them as unscaled, still checks them
        and still moves the scale.

        Args:
            gradients: List of gradients of the scaled loss, or `None`.

        Returns:
            List of float32 gradients.

        Raises:
            ValueError: If called a second time before `apply`.
        """
        self._check_built("unscale")
        if self._unscaled:
            raise ValueError(
                "`unscale` has already been called since the last `apply`; "
                "a second time would divide the gradients twice."
            )
        self._unscaled = True
        gradients = list(gradients)
        step = backend_step.current()
        inverse = 1.0 / step.value(self.dynamic_scale)
        return step.unscale(gradients, inverse, [False] * len(gradients))

    def get_scaled_loss(self, loss):
        """`scale_loss` under its Keras 2 name; a function is wrapped."""
        if callable(loss):
            return lambda: self.scale_loss(loss())
        return self.scale_loss(loss)

    def get_unscaled_gradients(self, grads):
        """`unscale` under its Keras 2 name."""
        return self.unscale(grads)

    def _check_built(self, method):
        if not self.built:
            raise ValueError(
                f"`{method}` needs an optimizer that has been built. Call "
                "`optimizer.build(model.trainable_variables)` first."
            )
