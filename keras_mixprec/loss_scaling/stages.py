"""Which gradients of an optimizer's step are unscaled already.

As in `torch.amp.GradScaler`, a step is skipped if `unscale` has seen gradients
overflow, because code between `unscale` and `apply` may make them finite.
Unlike there, `unscale` returns new tensors. Code that only looks at them
applies the original gradients, which are still scaled.
"""

import math
import sys
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_mixprec.backend import active
from keras_mixprec.backend.common import optimizers_of


class _Unscaled(NamedTuple):
    """What `unscale` has done in the step under way.

    Attributes:
        given: List of the gradients that it was given.
        returned: List of the gradients that it returned.
        overflows: List of tensors: which gradients overflowed in each call.
        trace: The trace that it was called in, or `None`.
    """

    given: list = []
    returned: list = []
    overflows: list = []
    trace: Any = None


class StepStages:
    """Follows the step of an optimizer from `scale_loss` to `apply`.

    The replicas of a strategy take turns between these calls, so each has a
    step of its own.

    Attributes:
        scaling: Boolean, whether a `train_step` scales the loss; `None` while
            that is not known.
    """

    def __init__(self):
        self.scaling = None
        self._backend = active.step()
        self._steps = {None: _Unscaled()}

    def __reduce__(self):
        return type(self), ()

    def begin(self):
        """A step begins: nothing is unscaled."""
        self._set(_Unscaled())

    def read_scale(self):
        """Notes that the loss scale is read, so a `train_step` may use it."""
        # A step that has applied gradients before cannot have scaled them.
        if self.scaling is None and _training_model() is not None:
            self.scaling = True

    def forgotten(self, name: str) -> str | None:
        """Returns a warning if a `train_step` has not scaled the loss.

        It does so once, when the `train_step` applies its first gradients.
        These are not divided then, so that training goes right. Outside of a
        `train_step`, code may have scaled the loss in any way.

        Args:
            name: String, the name of the optimizer.
        """
        model = _training_model() if self.scaling is None else None
        if model is None:
            return None
        # Another optimizer may have scaled the same loss.
        self.scaling = any(
            vars(other)["_stages"].scaling
            for other in optimizers_of(model).values()
            if "_stages" in vars(other)
        )
        done = (
            "Updates are wrong if the loss was not scaled, or if the scale of "
            "another optimizer differs, because gradients are divided by it"
            if self.scaling
            else "They are applied undivided, and small ones become 0 in "
            "float16"
        )
        return (
            f"The `train_step` of {model.name!r} applies gradients of a loss "
            f"that is not multiplied by the loss scale of {name!r}. {done}. "
            f"Call `loss = self.optimizer.{scaling_call()}` before you compute "
            "gradients."
        )

    @property
    def overflows(self) -> list:
        """The `overflows` of all calls of `unscale` in this step."""
        return self._get().overflows

    def unscaled(self, gradients: list, returned: list, scale, overflows: list):
        """Notes a call of `unscale`.

        Args:
            gradients: List of gradients, or `None`, as they were given.
            returned: List of what is returned for them.
            scale: Tensor. The loss scale.
            overflows: List of one tensor: which of the gradients overflow. It
                is empty without gradients.
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
        """Raises if any of the gradients is unscaled already."""
        known = self._get().returned
        if any(_is_in(known, g) for g in _present(gradients)):
            raise ValueError(
                "These gradients are unscaled already: `unscale` has returned "
                "them. Use `gradients = optimizer.unscale(gradients)` once, "
                "and compute norms from the result."
            )

    def are_unscaled(self, gradients: list, scale) -> bool:
        """Returns whether the gradients of an `apply` are unscaled.

        Gradients that `unscale` returned are unscaled, and gradients that it
        was given are not. New ones, such as clipped ones, are unscaled if
        `unscale` was given as many numbers.

        Args:
            gradients: List of gradients, or `None`.
            scale: Tensor. The loss scale.

        Raises:
            ValueError: If it cannot be known.
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
                    "These gradients may be scaled or not: `unscale` was "
                    "called outside of the function that is compiled now. Call "
                    "`unscale` and `apply` in one compiled function. To see "
                    "norms only, call `optimizer.gradient_norms()` after "
                    "`apply`."
                )
            return True
        if any(returned):
            raise ValueError(
                "Some of these gradients come from `unscale`, and the others "
                "are still scaled. Unscale all of them: `gradients = "
                "optimizer.unscale(gradients)`."
            )
        return False

    def _get(self):
        replica = self._backend.replica()
        return self._steps.get(replica, self._steps[None])

    def _set(self, step):
        replica = self._backend.replica()
        # Outside of replicas it is the step of them all.
        kept = {} if replica is None else self._steps
        self._steps = kept | {replica: step}


def _present(gradients):
    return [g for g in gradients if g is not None]


def _is_in(tensors, tensor):
    # `in` would compare the numbers of tensors.
    return any(tensor is other for other in tensors)


def _trace(tensors):
    return active.step().trace(_present(tensors))


def _count(tensors):
    """Returns how many numbers tensors have; infinity if it is not known."""
    shapes = [ops.shape(t) for t in as_tensors(tensors)]
    known = all(isinstance(n, int) for shape in shapes for n in shape)
    return sum(map(math.prod, shapes)) if known else math.inf


def as_tensors(gradients: list) -> list:
    """Returns gradients as tensors: lists and NumPy arrays may be given."""
    return [
        g if g is None or ops.is_tensor(g) else ops.convert_to_tensor(g)
        for g in gradients
    ]


def scaling_call() -> str:
    """Returns the method of the optimizer that a `train_step` calls."""
    if keras.backend.backend() == "jax":
        return "stateless_scale_loss(optimizer_variables, loss)"
    return "scale_loss(loss)"


def _training_model():
    """The model whose `train_step` is on the stack, `None` if there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        # AutoGraph calls its own translation `tf__train_step`.
        if code.co_name in ("train_step", "tf__train_step"):
            # The first argument is the model; it need not be called `self`.
            model = frame.f_locals.get([*code.co_varnames, None][0])
            if isinstance(model, keras.Model):
                return model
        frame = frame.f_back
    return None
