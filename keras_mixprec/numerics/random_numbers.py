"""Gives a float32 reference the random numbers of the 16-bit model.

From the same seed, a backend's generator draws different numbers for float16
and float32. Float16 numbers also have a different distribution: a uniform
number is 0 once in 1,024 or 2,048. So the reference draws each number in the
model's dtype, and then casts it to float32.
"""

import contextlib
import contextvars
import random
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops, tree

from keras_mixprec._patched import function_here, patched_here
from keras_mixprec.backend import active
from keras_mixprec.keras_internals import backend_random
from keras_mixprec.numerics.arrays import is_float
from keras_mixprec.numerics.layer_hooks import in_float32

# The name under which dropout's draws are recorded. Such a draw drops the same
# units in every dtype.
DROPOUT = "dropout"

_NAMES = ("normal", "uniform", "truncated_normal", "gamma", "beta", "binomial")


_SAME: contextvars.ContextVar[list | None] = contextvars.ContextVar(
    "same", default=None
)

# The random generators of a diagnosis, by the module whose generator each one
# replaces.
_OWN: contextvars.ContextVar[dict | None] = contextvars.ContextVar(
    "own", default=None
)


# The active `Draws`, in a context variable so that new threads start without
# them.
_ACTIVE: contextvars.ContextVar["Draws | None"] = contextvars.ContextVar(
    "active", default=None
)


class Draw(NamedTuple):
    """One call to a `keras.random` function: its name, and the dtype drawn."""

    name: str
    dtype: str


class Draws:
    """Draws Keras' random numbers within a context, and records the draws.

    Args:
        known: List of `Draw`, in the order of the calls. They set the dtypes to
            draw in. Defaults to `None`, the draws known within `same_draws`.

    Attributes:
        made: List of the `Draw`s made.
    """

    def __init__(self, known=None):
        self.made = []
        self._known = known_draws() if known is None else known
        self._inside = False

    @contextlib.contextmanager
    def active(self):
        """Context manager in which this object draws Keras' random numbers."""
        original = {
            n: function_here(backend_random, n)
            for n in (*_NAMES, "categorical")
        }
        instead = {n: self._drawing(n, original[n]) for n in _NAMES}
        instead["categorical"] = _from_float32(original["categorical"])
        instead[DROPOUT] = self._dropout(original["uniform"])
        token = _ACTIVE.set(self)
        try:
            with patched_here(backend_random, instead):
                yield self
        finally:
            _ACTIVE.reset(token)

    @staticmethod
    def so_far() -> list:
        """Returns the record of the innermost context, empty without one."""
        active = _ACTIVE.get()
        return active.made if active else []

    def _drawing(self, name, draw):
        def draw_as_known(*args, dtype=None, **kwargs):
            # Count nested draws once, because torch makes truncated normal
            # numbers from normal numbers.
            if self._inside:
                return draw(*args, dtype=dtype, **kwargs)
            asked = keras.backend.standardize_dtype(
                dtype or keras.backend.floatx()
            )
            own = self._dtype_of_next(name, asked)
            if own != asked:
                args, kwargs = _cast((args, kwargs), own)
            self._inside = True
            try:
                numbers = draw(*args, dtype=own, **kwargs)
            finally:
                self._inside = False
            return ops.cast(numbers, asked)

        return draw_as_known

    def _dtype_of_next(self, name, asked):
        index = len(self.made)
        same = index < len(self._known) and self._known[index].name == name
        own = self._known[index].dtype if same else asked
        self.made.append(Draw(name, own))
        return own

    def _dropout(self, uniform):
        def dropout(inputs, rate, noise_shape=None, seed=None):
            if not rate:
                return inputs
            self.made.append(Draw(DROPOUT, "float32"))
            if noise_shape is None:
                noise_shape = (None,) * len(inputs.shape)
            shape = [
                size if wanted is None else wanted
                for size, wanted in zip(inputs.shape, noise_shape, strict=True)
            ]
            numbers = uniform(shape, dtype="float32", seed=seed)
            kept = ops.greater_equal(numbers, rate)
            scaled = inputs if rate == 1 else inputs / (1.0 - rate)
            return ops.where(kept, scaled, ops.zeros_like(inputs))

        return dropout


@contextlib.contextmanager
def same_draws():
    """Context manager in which all steps of a model draw in the same dtypes.

    This applies to draws through Keras. Other draws come from generators whose
    state goes on from step to step.
    """
    if _SAME.get() is not None:
        yield
        return
    token, own = _SAME.set([]), _OWN.set({})
    try:
        yield
    finally:
        _SAME.reset(token)
        _OWN.reset(own)


@contextlib.contextmanager
def repeated_draws():
    """Context manager in which each step draws the same numbers.

    This includes numbers that a layer draws without Keras, but not numbers from
    TensorFlow's stateful operations.
    """
    token = _OWN.set(None)
    try:
        yield
    finally:
        _OWN.reset(token)


def known_draws() -> list:
    """Returns the draws of the 16-bit model, or an empty list if unknown."""
    known = _SAME.get()
    return [] if known is None else known


def exact_run(model: keras.Model, run: Callable, *, records: bool) -> Any:
    """Runs a model in float32, with the random numbers of the 16-bit model.

    If the draws are not known yet, a run in the model's own dtypes shows them.

    Args:
        model: The `keras.Model`.
        run: Function with the keyword arguments `records`, whether to record
            layer calls, and `drawing`, the `Draws` to use. Its result has the
            attribute `draws`, the list of draws.
        records: Boolean, whether to record layer calls.
    """
    with same_draws():
        with in_float32(model):
            exact = run(records=records)
        if known_draws() or all(d.name == DROPOUT for d in exact.draws):
            return exact
        drawing = Draws()
        # Even a run that raises an error shows most draws, because it usually
        # gets as far as the loss.
        with contextlib.suppress(*active.replay().REFUSALS):
            run(records=False, drawing=drawing)
        known_draws().extend(drawing.made)
        with in_float32(model):
            return run(records=records)


def _from_float32(categorical):
    def draw_from_float32(logits, *args, **kwargs):
        return categorical(ops.cast(logits, "float32"), *args, **kwargs)

    return draw_from_float32


def _cast(structure, dtype):
    return tree.map_structure(
        lambda x: ops.cast(x, dtype) if is_float(x) else x, structure
    )


@contextlib.contextmanager
def own_random_numbers():
    """Context in which this thread has its own NumPy and Python generators.

    They start as copies of the global ones. The numbers of other threads, such
    as those that load data, do not change.

    Yields:
        Dict for the generators of the backend.
    """
    own = _OWN.get()
    own = {} if own is None else own
    before = random.getstate(), np.random.get_state()
    if not own:
        own[random], own[np.random] = random.Random(), np.random.RandomState()
        own[random].setstate(before[0])
        own[np.random].set_state(before[1])
    with (
        patched_here(random, _methods(random, own[random])),
        patched_here(np.random, _methods(np.random, own[np.random])),
    ):
        yield own
    # User code that imported random functions by name still draws from the
    # global state. Restore this state, unless other threads may use it.
    if threading.active_count() == 1:
        random.setstate(before[0])
        np.random.set_state(before[1])


def _methods(module, own):
    """Returns functions that replace those of a random module, by name."""
    return {
        name: getattr(own, name)
        for name, function in vars(module).items()
        if isinstance(getattr(function, "__self__", None), type(own))
        and not name.startswith("_")
    }
