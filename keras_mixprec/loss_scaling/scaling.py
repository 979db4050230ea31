"""Scaling the loss and unscaling gradients, in `fit` and by hand."""

import sys
import threading
import warnings
import weakref

import keras
from keras import ops

from keras_mixprec.backend import active
from keras_mixprec.backend.common import optimizers_of


class HandScaling(threading.local):
    """What a custom training loop has called, on one thread.

    A replica of a `MirroredStrategy` is a thread. Gradients that were unscaled
    are known again by identity, and on torch by the version that each write
    into a tensor counts up.
    """

    def __init__(self):
        self.scaled = self.checked = self.forgotten = False
        self.pending = False
        self._known = {}

    def may_scale(self):
        """The loss scale is read; a `train_step` may multiply by it."""
        open_question = self.forgotten or not self.checked
        if open_question and not self.scaled and _training_model() is not None:
            self.scales()

    def scales(self):
        """The loss is multiplied by the loss scale."""
        self.scaled, self.forgotten = True, False

    def unscaled(self, gradients):
        """Remembers what `unscale` returns."""
        self.pending = True
        for gradient in gradients:
            if gradient is not None:
                self.unscaled_in_place(gradient)

    def unscaled_in_place(self, gradient):
        """Remembers what has been unscaled in its own memory."""
        mark = weakref.ref(gradient), _version(gradient)
        self._known[id(gradient)] = mark

    def knows(self, gradients) -> bool:
        """Whether gradients have been unscaled already."""
        first = next((g for g in gradients if g is not None), None)
        reference, version = self._known.get(id(first), (lambda: self, None))
        return reference() is first and version == _version(first)

    def take(self, gradients) -> bool:
        """Returns whether the gradients of an `apply` have been unscaled."""
        unscaled = self.pending or self.forgotten or self.knows(gradients)
        self.pending, self._known = False, {}
        if unscaled:
            self.unscaled(gradients)
            self.pending = False
        return unscaled

    def __reduce__(self):
        return HandScaling, ()


def _version(gradient):
    return getattr(gradient, "_version", None)


class ScalesByHand:
    """Mixin: what a custom training loop calls on the optimizer.

    Attributes:
        loss_not_scaled: Boolean. Whether a `train_step` has applied gradients
            of a loss that it did not multiply by the loss scale.
    """

    loss_not_scaled = False

    def scale_loss(self, loss):
        """Returns the loss in float32, multiplied by the loss scale.

        A float16 loss is cast first: 3.0 times a scale of 2**15 is infinite
        in float16.
        """
        self._by_hand.scales()
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
        by hand. The next `apply` takes its gradients as unscaled, still checks
        them and still moves the scale. A step may unscale the gradients of
        several backward passes: sharpness-aware minimization, for one,
        unscales those of both of its passes and applies the second.

        Args:
            gradients: List of gradients of the scaled loss, or `None`.

        Returns:
            List of float32 gradients.

        Raises:
            ValueError: If they are what `unscale` returned.
        """
        self._check_built("unscale")
        gradients = list(gradients)
        if self._by_hand.knows(gradients):
            raise ValueError(
                "These gradients are unscaled already: `unscale` has returned "
                "them, or `apply` has taken them as unscaled. A second time "
                "would divide them by the loss scale twice."
            )
        step = active.step()
        inverse = 1.0 / step.value(self._scale_variable)
        keep = [False] * len(gradients)
        unscaled = step.unscale(gradients, inverse, keep)
        self._by_hand.unscaled(unscaled)
        return unscaled

    @property
    def _unscaled(self):
        """Whether the next `apply` takes gradients that are unscaled."""
        return self._by_hand.pending or self._by_hand.forgotten

    def get_scaled_loss(self, loss):
        """`scale_loss` under its Keras 2 name; a function is wrapped."""
        if callable(loss):
            return lambda: self.scale_loss(loss())
        return self.scale_loss(loss)

    def get_unscaled_gradients(self, grads):
        """`unscale` under its Keras 2 name."""
        return self.unscale(grads)

    def _check_loss_was_scaled(self):
        """Detects a `train_step` whose loss is not scaled, and warns of it.

        Its gradients are not divided either, so that training goes right.
        Outside of a `train_step` the loss may have been scaled in any way.
        """
        used = self._by_hand
        used.checked = True
        if used.scaled or (model := _training_model()) is None:
            return
        # What another optimizer has scaled may be the loss of this one too.
        used.forgotten = self.loss_not_scaled = not any(
            other._by_hand.scaled
            for other in optimizers_of(model).values()
            if isinstance(other, ScalesByHand)
        )
        warnings.warn(
            _not_scaled(model.name, self.name, used.forgotten), stacklevel=4
        )

    def _check_built(self, method):
        if not self.built:
            raise ValueError(
                f"`{method}` needs an optimizer that has been built. Call "
                "`optimizer.build(model.trainable_variables)` first."
            )


def scaling_call() -> str:
    """Returns the method of the optimizer that a `train_step` calls."""
    if keras.backend.backend() == "jax":
        return "stateless_scale_loss(optimizer_variables, loss)"
    return "scale_loss(loss)"


def _not_scaled(model, optimizer, repaired):
    done = (
        "they are applied as they are, undivided, and small ones vanish in "
        "float16"
        if repaired
        else "they are divided by it all the same, which makes updates that "
        "much too small"
    )
    return (
        f"The `train_step` of {model!r} applies gradients of a loss that is "
        f"not multiplied by the loss scale of {optimizer!r}: {done}. Call "
        f"`loss = self.optimizer.{scaling_call()}` before the gradients are "
        "computed."
    )


def _training_model():
    """The model whose `train_step` is on the stack, `None` if there is none.

    AutoGraph calls its own translation `tf__train_step`.
    """
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name in ("train_step", "tf__train_step"):
            model = frame.f_locals.get("self")
            if isinstance(model, keras.Model):
                return model
        frame = frame.f_back
    return None
