"""The stage of an optimizer's step, and which calls are wrong in it.

| call | stage after it |
|---|---|
| `scale_loss` | `SCALED`; begins a step |
| `unscale` | `UNSCALED` |
| `apply` | `STEPPED` |

As in `torch.amp.GradScaler`, which skips a step whose gradients `unscale` has
seen overflow, too: code between the two may make them finite. But here
`unscale` returns new tensors. Code that only looks at them applies the original
gradients, which are still scaled.
"""

import math
import sys
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_mixprec.backend import active
from keras_mixprec.backend.common import optimizers_of

READY, SCALED, UNSCALED, STEPPED = "ready", "scaled", "unscaled", "stepped"


class _Step(NamedTuple):
    """Facts about a step.

    Attributes:
        stage: String, one of the four.
        given: List of the gradients that `unscale` was given.
        unscaled: List of those that it returned.
        overflows: List of what each `unscale` has seen, as in `unscales`.
        trace: The trace that it was called in, or `None`.
    """

    stage: str = READY
    given: list = []
    unscaled: list = []
    overflows: list = []
    trace: Any = None


class StepStages:
    """The stage of an optimizer's step.

    Replicas of one strategy take turns between its calls, so each has a stage
    of its own. Gradients are held from `unscale` to `apply`, no longer.

    Attributes:
        scaling: Boolean, whether a `train_step` scales the loss; `None` while
            that is not known.
    """

    def __init__(self):
        self.scaling = None
        self._backend = active.step()
        self._steps = {None: _Step()}

    def __reduce__(self):
        return type(self), ()

    def scales(self):
        """The loss is multiplied by the loss scale, which begins a step."""
        self.scaling = True
        self._set(_Step(SCALED))

    def reads_scale(self):
        """The loss scale is read; a `train_step` may multiply by it.

        Not if it has applied gradients before it read the scale.
        """
        if self.scaling is None and training_model() is not None:
            self.scaling = True

    def forgotten(self, optimizer) -> str | None:
        """Returns what to say of a `train_step` whose loss is not scaled.

        Once, as it applies its first gradients, which are not divided then, so
        that training goes right. Outside of a `train_step` the loss may have
        been scaled in any way.

        Args:
            optimizer: The optimizer that these stages are of.
        """
        model = training_model() if self.scaling is None else None
        if model is None:
            return None
        # Another optimizer may have scaled the same loss.
        self.scaling = any(
            vars(other)["_stages"].scaling
            for other in optimizers_of(model).values()
            if "_stages" in vars(other)
        )
        done = (
            "They are divided by it all the same. Updates are wrong if the "
            "loss was not scaled, or if the scale of another optimizer differs"
            if self.scaling
            else "They are applied as they are, undivided. Small ones become 0 "
            "in float16"
        )
        return (
            f"The `train_step` of {model.name!r} applies gradients of a loss "
            "that is not multiplied by the loss scale of "
            f"{optimizer.name!r}. {done}. Call `loss = self.optimizer."
            f"{scaling_call()}` before the gradients are computed."
        )

    @property
    def overflows(self) -> list:
        """What each `unscale` of the step has seen, as in `unscales`."""
        return self._get().overflows

    def unscales(self, gradients: list, unscaled: list, scale, overflows: list):
        """`unscale` returns what it has made of gradients.

        Args:
            gradients: List of gradients, or `None`, as they were given.
            unscaled: List of what is returned for them.
            scale: Tensor. The loss scale.
            overflows: List of one tensor: which of the gradients overflow. It
                is empty without gradients.
        """
        step = self._get()
        self._set(
            _Step(
                UNSCALED,
                step.given + _present(gradients),
                step.unscaled + _present(unscaled),
                step.overflows + overflows,
                _trace([scale, *gradients]),
            )
        )

    def steps(self):
        """`apply` has taken gradients, which ends the step."""
        self._set(_Step(STEPPED))

    def check_unscale(self, gradients: list):
        """Raises if any of the gradients is unscaled already."""
        known = self._get().unscaled
        if any(_is_in(known, g) for g in _present(gradients)):
            raise ValueError(_TWICE)

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
        step = self._get()
        if self.scaling is False or step.stage is not UNSCALED:
            return self.scaling is False
        gradients = _present(gradients)
        unscaled = [_is_in(step.unscaled, g) for g in gradients]
        if all(unscaled):
            return True
        given = any(_is_in(step.given, g) for g in gradients)
        if not given and _count(step.unscaled) >= _count(gradients):
            if step.trace is not _trace([scale, *gradients]):
                raise ValueError(_OTHER_FUNCTION)
            return True
        if any(unscaled):
            raise ValueError(_MIXED)
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


def training_model():
    """The model whose `train_step` is on the stack, `None` if there is none.

    AutoGraph calls its own translation `tf__train_step`.
    """
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name in ("train_step", "tf__train_step"):
            # The first argument is the model; it need not be called `self`.
            model = frame.f_locals.get([*code.co_varnames, None][0])
            if isinstance(model, keras.Model):
                return model
        frame = frame.f_back
    return None


_TWICE = """\
These gradients are unscaled already: `unscale` has returned them, or `apply`
has taken them as unscaled.
Wrong:
    grads = optimizer.unscale(grads)
    norm = global_norm(optimizer.unscale(grads))
Right:
    grads = optimizer.unscale(grads)
    norm = global_norm(grads)"""

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
