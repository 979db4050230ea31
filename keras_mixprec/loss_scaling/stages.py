"""Tracks which gradients of an optimizer step are already unscaled.

As in `torch.amp.GradScaler`, an overflow in `unscale` skips the step, because
code between `unscale` and `apply` may make the gradients finite. Unlike in
torch, `unscale` returns new tensors. Code that only reads the new tensors may
still apply the original gradients, which are scaled.
"""

import math
import sys
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_mixprec.backend import active
from keras_mixprec.backend.common import optimizers_of


class _Unscaled(NamedTuple):
    """The calls to `unscale` in the current step.

    Attributes:
        given: List of the gradients that were passed to `unscale`.
        returned: List of the gradients that `unscale` returned.
        overflows: List of one tensor per call, which marks the gradients that
            overflowed.
        trace: The trace of the last call, or `None`.
    """

    given: list = []
    returned: list = []
    overflows: list = []
    trace: Any = None


class StepStages:
    """Follows an optimizer step from `scale_loss` to `apply`.

    The replicas of a strategy take turns between the calls of a step, so each
    replica has its own state.

    Attributes:
        scaling: Boolean. True if a `train_step` scales the loss. `None` until
            the first `train_step` shows whether it does.
    """

    def __init__(self):
        self.scaling = None
        self._backend = active.step()
        self._steps = {None: _Unscaled()}

    def __reduce__(self):
        return type(self), ()

    def begin(self):
        """Starts a step, in which no gradient is unscaled yet."""
        self._set(_Unscaled())

    def read_scale(self):
        """Assumes that a `train_step` scales the loss if it reads the scale."""
        if self.scaling is None and _training_model() is not None:
            self.scaling = True

    def forgotten(self, name: str) -> str | None:
        """Returns a warning if a `train_step` has not scaled the loss.

        The warning comes once, with the first gradients that the `train_step`
        applies. The optimizer does not unscale them, so training stays correct.
        Outside of a `train_step`, code may scale the loss in its own way, so
        there is no warning.

        Args:
            name: String. Name of the optimizer.
        """
        model = _training_model() if self.scaling is None else None
        if model is None:
            return None
        # In a model with several optimizers, a different optimizer may have
        # scaled the loss that all optimizers share.
        self.scaling = any(
            vars(other)["_stages"].scaling
            for other in optimizers_of(model).values()
            if "_stages" in vars(other)
        )
        done = (
            "The optimizer divides these gradients by its loss scale, so "
            "updates are wrong unless another optimizer scaled the loss by the "
            "same scale"
            if self.scaling
            else "The optimizer applies them undivided, and small ones "
            "underflow in float16"
        )
        return (
            f"The `train_step` of {model.name!r} applies gradients of a loss "
            f"that is not multiplied by the loss scale of {name!r}. {done}. "
            f"Call `loss = self.optimizer.{scaling_call()}` before you compute "
            "gradients."
        )

    @property
    def overflows(self) -> list:
        """The overflow tensors of all `unscale` calls in this step."""
        return self._get().overflows

    def unscaled(self, gradients: list, returned: list, scale, overflows: list):
        """Records a call to `unscale`.

        Args:
            gradients: List of the gradients passed to `unscale`. Entries may
                be `None`.
            returned: List of the gradients that `unscale` returned.
            scale: Tensor. The loss scale.
            overflows: List of one tensor, which marks the gradients that
                overflow. Empty if there are no gradients.
        """
        step = self._get()
        self._set(
            _Unscaled(
                step.given + _present(gradients),
                step.returned + _present(returned),
                step.overflows + overflows,
                _trace([scale, *gradients]),
            )
        )

    def check_unscale(self, gradients: list):
        """Raises if `unscale` has already returned any of the gradients."""
        known = self._get().returned
        if any(_is_in(known, g) for g in _present(gradients)):
            raise ValueError(
                "These gradients are unscaled already, because `unscale` "
                "returned them. Call `gradients = optimizer.unscale(gradients)`"
                " once, and compute norms from the result."
            )

    def are_unscaled(self, gradients: list, scale) -> bool:
        """Returns whether the gradients passed to `apply` are unscaled.

        Gradients that `unscale` returned are unscaled. Gradients that were
        passed to `unscale` are not. New gradients, such as clipped ones, count
        as unscaled if they have no more elements than `unscale` returned.

        Args:
            gradients: List of gradients. Entries may be `None`.
            scale: Tensor. The loss scale.

        Raises:
            ValueError: If the optimizer cannot tell.
        """
        step = self._get()
        if self.scaling is False or not step.given:
            return self.scaling is False
        gradients = _present(gradients)
        returned = [_is_in(step.returned, g) for g in gradients]
        if all(returned):
            return True
        given = any(_is_in(step.given, g) for g in gradients)
        if not given and _count(step.returned) >= _count(gradients):
            if step.trace is not _trace([scale, *gradients]):
                raise ValueError(
                    "The optimizer cannot tell whether these gradients are "
                    "scaled, because `unscale` was called outside of the "
                    "function that is now compiled. Call `unscale` and `apply` "
                    "in one compiled function. If you only need norms, call "
                    "`optimizer.gradient_norms()` after `apply`."
                )
            return True
        if any(returned):
            raise ValueError(
                "Some of these gradients come from `unscale`, and the others "
                "are still scaled. Unscale all gradients: `gradients = "
                "optimizer.unscale(gradients)`."
            )
        return False

    def _get(self):
        replica = self._backend.replica()
        return self._steps.get(replica, self._steps[None])

    def _set(self, step):
        replica = self._backend.replica()
        # A call outside of a replica context counts for all replicas.
        kept = {} if replica is None else self._steps
        self._steps = kept | {replica: step}


def _present(gradients):
    return [g for g in gradients if g is not None]


def _is_in(tensors, tensor):
    # Compare identities, because Python's `in` would compare tensors by value.
    return any(tensor is other for other in tensors)


def _trace(tensors):
    return active.step().trace(_present(tensors))


def _count(tensors):
    """Returns the number of elements, or infinity if a shape is unknown."""
    shapes = [ops.shape(t) for t in as_tensors(tensors)]
    known = all(isinstance(n, int) for shape in shapes for n in shape)
    return sum(map(math.prod, shapes)) if known else math.inf


def as_tensors(gradients: list) -> list:
    """Converts gradients that are lists or NumPy arrays to tensors."""
    return [
        g if g is None or ops.is_tensor(g) else ops.convert_to_tensor(g)
        for g in gradients
    ]


def scaling_call() -> str:
    """Returns the call with which a `train_step` scales the loss."""
    if keras.backend.backend() == "jax":
        return "stateless_scale_loss(optimizer_variables, loss)"
    return "scale_loss(loss)"


def _training_model():
    """Returns the model whose `train_step` is on the stack, or `None`."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        # AutoGraph converts `train_step` to a function named `tf__train_step`.
        if code.co_name in ("train_step", "tf__train_step"):
            # The model is the first argument of `train_step`, even if that
            # argument is not named `self`.
            model = frame.f_locals.get([*code.co_varnames, None][0])
            if isinstance(model, keras.Model):
                return model
        frame = frame.f_back
    return None
