"""Holds optimizers: they record losses and gradients, but update nothing."""

import contextlib
import contextvars
import functools
import operator
from collections.abc import Callable

import keras

from keras_mixprec._patched import (
    Replacements,
    function_here,
    patched,
    patched_here,
)
from keras_mixprec.backend import active
from keras_mixprec.keras_internals import stored_value, updated_variables

_TIMES = contextvars.ContextVar("times", default=1.0)


@contextlib.contextmanager
def overflowing():
    """Context in which held optimizers multiply every loss by infinity."""
    token = _TIMES.set(float("inf"))
    try:
        yield
    finally:
        _TIMES.reset(token)


def is_scaling(optimizer) -> bool:
    """Returns whether an optimizer, or one inside it, scales the loss."""
    return (
        isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        or optimizer.loss_scale_factor is not None
        or any(map(is_scaling, _wrapped(optimizer)))
    )


def _wrapped(optimizer):
    held = vars(optimizer).values()
    return [x for x in held if isinstance(x, keras.optimizers.Optimizer)]


def with_wrapped(optimizer) -> list:
    """Returns an optimizer and the optimizers inside it, outermost first."""
    return [optimizer, *sum(map(with_wrapped, _wrapped(optimizer)), [])]


def scale_variables(optimizer: keras.Optimizer) -> list:
    """Returns the variables that a step reads the loss scale from."""
    # Look in the `__dict__` of the optimizer, because reading the property
    # `dynamic_scale` would count as using the loss scale.
    names = "_scale_variable", "dynamic_scale"
    own = [vars(optimizer).get(name) for name in names]
    found = [v for v in own if isinstance(v, keras.Variable)]
    for inner in _wrapped(optimizer):
        found += scale_variables(inner)
    return found


@contextlib.contextmanager
def held(optimizer, scale, losses, gradients):
    """Context in which an optimizer records losses and gradients only.

    Methods of the user's own class still run until they call Keras' methods or
    ours. A wrapper's `apply` still runs until it calls an optimizer that scales
    the loss.
    """
    inner = _wrapped(optimizer)
    wraps_scaling = any(map(is_scaling, inner))
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    with contextlib.ExitStack() as stack:
        methods = _Held(optimizer, scale, losses, gradients, wraps_scaling)
        if scales or wraps_scaling:
            for each in inner:
                taken = {}
                stack.enter_context(held(each, scale, losses, taken))
                stack.callback(methods.take, taken, is_scaling(each))
        if scales:
            stack.enter_context(_replaced(optimizer, methods.of_scaling()))
        elif not wraps_scaling:
            stack.enter_context(patched(optimizer, methods.of_any()))
        yield


class _Held:
    """The methods that replace one optimizer's own methods."""

    def __init__(self, optimizer, scale, losses, gradients, hands_on):
        self._optimizer = optimizer
        self._scale = scale
        self._losses = losses
        self._gradients = gradients
        self._hands_on = hands_on
        self._unscaled = None

    def of_any(self):
        own = {"loss_scale_factor": self._scale}
        if self._optimizer.loss_scale_factor is None:
            own = {}
        return own | {
            "scale_loss": self._scale_loss,
            "unscale": self._unscale,
            "stateless_scale_loss": lambda _, loss: self._scale_loss(loss),
            "apply": self._apply,
            "apply_gradients": lambda pairs: self._apply(
                *zip(*pairs, strict=True)
            ),
            "stateless_apply": self._stateless_apply(self._apply),
        }

    def of_scaling(self):
        optimizer, own = self._optimizer, {}
        apply = self._apply
        if hasattr(optimizer, "_check_gradients"):
            apply = lambda grads: optimizer.apply(grads)  # noqa: E731
            own = {
                "_initial_scale": lambda: self._scale,
                # Optimizers that skip steps together call `_check_gradients`.
                "_check_gradients": functools.partial(_HeldStep, self._apply),
            }
        return (
            self.of_any()
            | own
            | {
                "initial_scale": self._scale,
                "stateless_scale_loss": lambda _, loss: optimizer.scale_loss(
                    loss
                ),
                "apply_gradients": lambda pairs: optimizer.apply(
                    *map(list, zip(*pairs, strict=True))
                ),
                "stateless_apply": self._stateless_apply(apply),
            }
        )

    def take(self, gradients, scaled):
        """Records the gradients that an inner optimizer received."""
        for key, gradient in gradients.items():
            if not scaled:
                (gradient,) = _times([gradient], self._scale)
            self._gradients[key] = gradient

    def _scale_loss(self, loss):
        self._unscaled = None  # Scaling a loss begins a new step.
        loss = keras.ops.cast(loss, "float32")
        observe = active.replay().observe
        loss = observe(loss, self._losses.append, lambda _: None)
        return loss * (self._scale * _TIMES.get())

    def _unscale(self, grads):
        # Remember the gradients. Code may unscale gradients only to log their
        # norm, and then apply the scaled gradients.
        self._unscaled = grads = list(grads)
        return _times(grads, 1.0 / self._scale)

    def _apply(self, grads, trainable_variables=None):
        grads = list(grads)
        variables = trainable_variables or updated_variables(self._optimizer)
        known = self._unscaled
        unscaled = known is not None and not _same(known, grads)
        if self._hands_on:
            if not unscaled:
                grads = _times(grads, 1.0 / self._scale)
            self._optimizer.inner_optimizer.apply(grads, list(variables))
            return
        # An optimizer remembers overflows from `unscale`, even if the code
        # makes the gradients finite afterwards.
        if unscaled:
            grads = _times(grads, self._scale * _TIMES.get())
        for gradient, variable in zip(grads, variables, strict=True):
            if gradient is not None:
                self._gradients[id(variable)] = gradient

    @staticmethod
    def _stateless_apply(apply):
        def stateless_apply(optimizer_variables, grads, trainable_variables):
            apply(grads)
            return trainable_variables, optimizer_variables

        return stateless_apply


def scaled(gradients: dict, scale) -> dict:
    """Returns gradients, by the ids of variables, multiplied by a scale."""
    found = _times([*gradients.values()], scale)
    return dict(zip(gradients, found, strict=True))


def _times(grads, factor):
    return active.step().unscale([*grads], factor, [False] * len(grads))


def _same(one, other):
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _replaced(optimizer, methods):
    """Returns a context that replaces methods of Keras' or our optimizers.

    A method of the user's own subclass still runs, and its `super()` calls the
    replacement.
    """
    replacements = Replacements()
    for name, method in methods.items():
        owner = _owner(optimizer, name)
        if owner is not optimizer:
            method = _for_one(optimizer, method, vars(owner)[name])
        replacements.add(owner, name, method)
    return replacements


def _for_one(optimizer, method, original):
    def instead(self, *args, **kwargs):
        if self is optimizer:
            return method(*args, **kwargs)
        return original(self, *args, **kwargs)

    return instead


def _owner(optimizer, name):
    """Returns where to replace a method: the object, or the library's class."""
    classes = [c for c in type(optimizer).__mro__ if name in vars(c)]
    found = [x for x in (optimizer, *classes) if name in vars(x)]
    library = [x for x in found if _is_of_library(vars(x)[name])]
    overridden = found and library[:1] != found[:1]
    return library[0] if overridden and library else optimizer


def _is_of_library(function):
    module = getattr(function, "__module__", None) or ""
    return module.partition(".")[0] in ("keras", "keras_mixprec")


class _HeldStep:
    """Takes the place of a `CheckedGradients`."""

    finite = ordinary = True

    def __init__(self, apply, gradients, variables):
        self._given = gradients, variables
        self._apply = apply

    def commit(self, finite, ordinary):
        """Applies nothing, as the optimizer is held."""
        self._apply(*self._given)


def instead_of_optimizers(methods: dict) -> contextlib.ExitStack:
    """Returns a context that replaces methods of all optimizers.

    The context replaces the methods of every class, because a `train_step` may
    keep an optimizer anywhere. Other threads keep the original methods.

    Args:
        methods: Dict from the name of a method to its replacement. This
            function receives the original method, and then its arguments.
    """
    with contextlib.ExitStack() as stack:
        for cls in _classes(keras.optimizers.Optimizer):
            own = {
                name: functools.partial(method, function_here(cls, name))
                for name, method in methods.items()
                if name in vars(cls)
            }
            if own:
                stack.enter_context(patched_here(cls, own))
        return stack.pop_all()


def _classes(cls):
    """Returns a class, its subclasses, and all of their bases."""
    found = dict.fromkeys(cls.__mro__)
    for sub in cls.__subclasses__():
        found |= _classes(sub)
    return found


class Held:
    """Collects the losses and gradients that a step passes to its optimizers.

    An optimizer is held from the step's first call to one of its methods.

    Args:
        scale_of: Function of an optimizer that returns its loss scale.
    """

    def __init__(self, scale_of: Callable):
        self._scale_of = scale_of
        self._seen: list = []
        self._native: dict = {}
        # Keep the optimizers alive, so that Python does not reuse their ids.
        self._held: dict = {}
        self._stack = contextlib.ExitStack()

    @contextlib.contextmanager
    def holding(self):
        """Context that holds the optimizers of this thread."""
        names = (
            "scale_loss",
            "stateless_scale_loss",
            "unscale",
            "apply",
            "apply_gradients",
            "stateless_apply",
            "_check_gradients",
        )
        methods = {name: self._first(name) for name in names}
        with instead_of_optimizers(methods), self._stack:
            yield

    def taken(self) -> tuple:
        """Returns the losses and gradients that the optimizers received.

        Returns:
            Tuple of the list of losses that the step scales, without the loss
            scale, a dict from `id(variable)` to its scaled gradient, and a dict
            from `id(variable)` to the loss scale of this gradient.
        """
        losses, gradients, scales = [], dict(self._native), {}
        some_scale = any(is_scaling(optimizer) for optimizer, *_ in self._seen)
        for optimizer, scale, own_losses, own in self._seen:
            losses += own_losses
            if some_scale and not own_losses and not is_scaling(optimizer):
                # A different optimizer scales the loss, and this optimizer
                # received unscaled gradients. So multiply its gradients by the
                # loss scale.
                own = scaled(own, scale)
            gradients |= own
            scales |= dict.fromkeys(own, scale)
        return losses, gradients, scales

    def stepped(self, model, updated: list):
        """Records the gradients that a backend's own optimizer will apply.

        Args:
            model: The `keras.Model` of the step.
            updated: List of pairs of a parameter and its gradient.
        """
        known = {id(stored_value(v)): v for v in model.trainable_variables}
        for parameter, gradient in updated:
            if id(parameter) in known:
                self._native[id(known[id(parameter)])] = gradient

    def _first(self, name):
        def method(original, optimizer, *args, **kwargs):
            if id(optimizer) in self._held:
                return original(optimizer, *args, **kwargs)
            self._hold(optimizer)
            return getattr(optimizer, name)(*args, **kwargs)

        return method

    def _hold(self, optimizer):
        self._held |= {id(o): o for o in with_wrapped(optimizer)}
        own = optimizer, self._scale_of(optimizer), [], {}
        self._seen.append(own)
        self._stack.enter_context(held(*own))
