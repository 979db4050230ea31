"""Optimizers that take gradients and change nothing, whoever holds them."""

import contextlib
import functools
from collections.abc import Callable

import keras

from keras_mixprec._patched import function_here, patched_here
from keras_mixprec.keras_internals import stored_value
from keras_mixprec.numerics.held_optimizer import (
    held,
    is_scaling,
    scaled,
    with_wrapped,
)


def instead_of_optimizers(methods: dict) -> contextlib.ExitStack:
    """Returns a context that gives all optimizers other methods here.

    It replaces the methods of every class, because a `train_step` may keep an
        optimizer anywhere. Other threads go on training.

    Args:
        methods: Dict from a name to a function, which gets the method that it
            takes the place of, then what that is called with.
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
    """A class, all that derive from it, and what those derive from."""
    found = dict.fromkeys(cls.__mro__)
    for sub in cls.__subclasses__():
        found |= _classes(sub)
    return found


class Held:
    """Collects what a step gives its optimizers.

    Each is held from the moment on that the step turns to it.

    Args:
        scale_of: Function of an optimizer that returns its loss scale.
    """

    def __init__(self, scale_of: Callable):
        self._scale_of = scale_of
        self._seen: list = []
        self._native: dict = {}
        # Kept, so that no other gets the id of one.
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
        """Returns what the optimizers were given.

        Returns:
            List of the losses that were scaled, as they were before, a dict
            from `id(variable)` to its scaled gradient, and one from that to
            the loss scale in it.
        """
        losses, gradients, scales = [], dict(self._native), {}
        some_scale = any(is_scaling(optimizer) for optimizer, *_ in self._seen)
        for optimizer, scale, own_losses, own in self._seen:
            losses += own_losses
            if some_scale and not own_losses and not is_scaling(optimizer):
                # Next to an optimizer that scales, this one gets gradients at
                # scale 1.
                own = scaled(own, scale)
            gradients |= own
            scales |= dict.fromkeys(own, scale)
        return losses, gradients, scales

    def stepped(self, model, updated: list):
        """Takes what an optimizer of the backend itself is about to update.

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
