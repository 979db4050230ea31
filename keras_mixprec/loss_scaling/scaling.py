"""Scaling the loss and unscaling gradients, in `fit` and by hand."""

import math
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_mixprec.backend import active
from keras_mixprec.backend.common import optimizers_of


class _Step(NamedTuple):
    """The calls of `unscale` since the loss was scaled, or a step was taken.

    Attributes:
        given: Dict of marks, the gradients that `unscale` was given.
        returned: Dict of marks, those that it returned, or that the last
            `apply` took as unscaled.
        numbers: Int. How many numbers it was given.
        trace: Reference to the trace that it was called in, or `None`.
    """

    given: dict = {}
    returned: dict = {}
    numbers: float = 0
    trace: Any = None


class StepStages:
    """The stage of an optimizer's step, as `torch.amp.GradScaler` has it.

    `scale_loss` begins a step. `unscale` makes it an unscaled one, and `apply`
    ends it. Replicas of one strategy take turns between these calls, so each
    has a stage of its own; which thread calls makes no difference.

    Attributes:
        scaling: Boolean. Whether a `train_step` scales the loss; `None` while
            that is not known.
    """

    def __init__(self):
        self.scaling = None
        self._steps = {None: _Step()}

    def __reduce__(self):
        return type(self), ()

    def scales(self):
        """The loss is multiplied by the loss scale, which begins a step."""
        self.scaling = True
        self._set(_Step())

    def unscales(self, gradients: list, unscaled: list, scale):
        """`unscale` returns what it has made of gradients.

        Args:
            gradients: List of gradients, or `None`, as they were given.
            unscaled: List of what is returned for them.
            scale: Tensor. The loss scale.
        """
        step = self._get()
        present = [g for g in gradients if g is not None]
        self._set(
            _Step(
                step.given | _marks(present),
                step.returned | _marks(u for u in unscaled if u is not None),
                step.numbers + _count(u for u in unscaled if u is not None),
                _trace([scale, *present]),
            )
        )

    def unscaled_in_place(self, gradients: list):
        """`apply` has written unscaled gradients over those it was given."""
        self._set(_Step(returned=_marks(g for g in gradients if g is not None)))

    def returned(self, gradients: list) -> bool:
        """Whether `unscale` returned any of them, or `apply` has taken them."""
        known = self._get().returned
        return any(_is_marked(known, g) for g in gradients if g is not None)

    def are_unscaled(self, gradients: list, scale) -> bool:
        """Returns whether the gradients of an `apply` are unscaled ones.

        The very tensors that `unscale` was given are not, those that it
        returned are. New ones are, such as clipped ones, if it was given as
        many numbers.

        Args:
            gradients: List of gradients, or `None`.
            scale: Tensor. The loss scale.

        Raises:
            ValueError: If it cannot be known.
        """
        if self.scaling is False:
            return True
        step = self._get()
        if not step.returned:
            return False
        present = [g for g in gradients if g is not None]
        given = [_is_marked(step.given, g, False) for g in present]
        returned = [_is_marked(step.returned, g) for g in present]
        if all(returned):
            return True
        if not any(given) and step.numbers >= _count(as_tensors(present)):
            if step.trace != _trace([scale, *present]):
                raise ValueError(_OTHER_FUNCTION)
            return True
        if any(returned):
            raise ValueError(_MIXED)
        return False

    def take(self, gradients: list, scale) -> bool:
        """Returns what `are_unscaled` does, and ends the step."""
        unscaled = self.are_unscaled(gradients, scale)
        self._set(_Step())
        if unscaled:
            self.unscaled_in_place(gradients)
        return unscaled

    def _get(self):
        replica = active.step().replica()
        return self._steps.get(replica, self._steps[None])

    def _set(self, step):
        replica = active.step().replica()
        # Outside of replicas it is the step of them all.
        kept = {} if replica is None else self._steps
        self._steps = kept | {replica: step}


def _marks(tensors):
    return {id(t): (_reference(t), _version(t)) for t in tensors}


def _is_marked(marks, tensor, unwritten=True):
    """Whether a tensor has a mark, and was not written to since."""
    reference, version = marks.get(id(tensor), (lambda: marks, None))
    if reference() is not tensor:
        return False
    return not unwritten or version == _version(tensor)


def _version(tensor):
    """What each write into the memory of a tensor of torch counts up."""
    return getattr(tensor, "_version", None)


def _reference(thing):
    try:
        return weakref.ref(thing)
    except TypeError:  # Lists and numbers.
        return lambda: thing


def _trace(tensors):
    """Returns a reference to the trace of tensors, `None` outside of any."""
    trace = active.step().trace(tensors)
    return None if trace is None else weakref.ref(trace)


def _count(tensors):
    """Returns how many numbers tensors have; infinity if it is not known."""
    shapes = [ops.shape(t) for t in tensors]
    known = all(isinstance(n, int) for shape in shapes for n in shape)
    return sum(map(math.prod, shapes)) if known else math.inf


_MIXED = """\
Some of these gradients come from `unscale`, others are still scaled.
Wrong:
    grads[0] = optimizer.unscale(grads[:1])[0]
    optimizer.apply(grads)
Right:
    grads = optimizer.unscale(grads)
    optimizer.apply(grads)"""

_OTHER_FUNCTION = """\
These gradients may be scaled or not: `unscale` was called outside of the
function that is compiled now, which gets its results as new tensors.
Wrong:
    unscaled = optimizer.unscale(grads)
    compiled_apply(grads or unscaled)
Right, to change them: call `unscale` and `apply` in one compiled function.
Right, to look at them: `norm(grads) / optimizer.loss_scale`, or after `apply`
`optimizer.gradient_norms()`."""


class ScalesByHand:
    """Mixin: what a custom training loop calls on the optimizer.

    Attributes:
        loss_not_scaled: Boolean. Whether a `train_step` has applied gradients
            of a loss that it did not multiply by the loss scale.
    """

    # Of the optimizer that this is mixed into.
    _stages: StepStages
    _scale_in_use: Callable[[], Any]

    loss_not_scaled = False

    def scale_loss(self, loss):
        """Returns the loss in float32, multiplied by the loss scale.

        A float16 loss is cast first: 3.0 times a scale of 2**15 is infinite
        in float16.
        """
        self._stages.scales()
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
        by hand. `apply` takes the gradients that this returns, and what is
        computed from them, as unscaled. It divides those that were given here,
        so you may look at a norm and apply these. It still checks all of them
        and moves the scale. The next `scale_loss` begins a new step.

        It divides the gradients of a loss that was never scaled too, so call
        `scale_loss` first.

        A step may unscale the gradients of several backward passes.
        Sharpness-aware minimization, for one, unscales those of both of its
        passes and applies the second.

        Args:
            gradients: List of gradients of the scaled loss, or `None`.

        Returns:
            List of float32 gradients.

        Raises:
            ValueError: If they are what `unscale` returned.
        """
        gradients = list(gradients)
        if self._stages.returned(gradients):
            raise ValueError(
                "These gradients are unscaled already: `unscale` has returned "
                "them, or `apply` has taken them as unscaled. A second time "
                "would divide them by the loss scale twice."
            )
        scale = self._scale_in_use()
        keep = [False] * len(gradients)
        inverse = 1.0 / scale
        unscaled = active.step().unscale(as_tensors(gradients), inverse, keep)
        self._stages.unscales(gradients, unscaled, scale)
        return unscaled

    def scale_of(self, gradients: list):
        """Returns what gradients are scaled by that `apply` would be given.

        Args:
            gradients: List of gradients, or `None`.
        """
        scale = self._scale_in_use()
        unscaled = gradients and self._stages.are_unscaled(gradients, scale)
        return ops.ones_like(scale) if unscaled else scale

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
        stages = self._stages
        if stages.scaling is not None:
            return
        model = _training_model()
        if model is None:
            return
        # What another optimizer has scaled may be the loss of this one too.
        stages.scaling = any(
            other._stages.scaling
            for other in optimizers_of(model).values()
            if isinstance(other, ScalesByHand)
        )
        self.loss_not_scaled = not stages.scaling
        warnings.warn(
            _not_scaled(model.name, self.name, self.loss_not_scaled),
            stacklevel=4,
        )

    def _may_scale(self):
        """The loss scale is read; a `train_step` may multiply by it.

        Not if it has applied gradients before it read the scale.
        """
        if self._stages.scaling is None and _training_model() is not None:
            self._stages.scaling = True

    def _check_built(self, method):
        if not self.built:
            raise ValueError(
                f"`{method}` needs an optimizer that has been built. Call "
                "`optimizer.build(model.trainable_variables)` first."
            )


def as_tensors(gradients: list) -> list:
    """Returns gradients as tensors: lists and NumPy arrays may be given."""
    is_sparse = active.step().is_sparse
    return [
        g if g is None or is_sparse(g) else ops.convert_to_tensor(g)
        for g in gradients
    ]


def scaling_call() -> str:
    """Returns the method of the optimizer that a `train_step` calls."""
    if keras.backend.backend() == "jax":
        return "stateless_scale_loss(optimizer_variables, loss)"
    return "scale_loss(loss)"


def _not_scaled(model, optimizer, repaired):
    done = (
        "They are applied as they are, undivided. Small ones become 0 in "
        "float16"
        if repaired
        else "It was multiplied by the scale of another optimizer, so updates "
        "are wrong as soon as the two scales differ"
    )
    return (
        f"The `train_step` of {model!r} applies gradients of a loss that is "
        f"not multiplied by the loss scale of {optimizer!r}. {done}. Call "
        f"`loss = self.optimizer.{scaling_call()}` before the gradients are "
        "computed."
    )


def _training_model():
    """The model whose `train_step` is on the stack, `None` if there is none.

    AutoGraph calls its own translation `tf__train_step`.
    """
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_name in ("train_step", "tf__train_step"):
            # Its first argument, which not everybody calls `self`.
            model = frame.f_locals.get([*code.co_varnames, None][0])
            if isinstance(model, keras.Model):
                return model
        frame = frame.f_back
    return None
