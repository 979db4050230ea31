"""What all backends share: variables, programs, agreement of workers.

Many layers of a model are alike, and every diagnosis of it runs the same, but
a backend recompiles each function: 0.15 s each, three quarters of the time
that a diagnosis of 40 dense layers takes.
"""

import contextlib
from collections.abc import Callable, Hashable

import keras
import numpy as np

from keras_mixprec.backend import active


def optimizers_of(model: keras.Model) -> dict:
    """Returns the optimizers of a model, by the name of the attribute.

    One that has several names is `"optimizer"`, or what it was called first.
    """
    found = {
        name: value
        for name, value in vars(model).items()
        if isinstance(value, keras.optimizers.Optimizer)
    }
    names = sorted(found, key=lambda name: name != "optimizer")
    first = {id(found[name]): name for name in reversed(names)}
    return {name: o for name, o in found.items() if first[id(o)] == name}


def all_variables(model: keras.Model) -> list:
    """Returns every variable of a model, its metrics and its optimizers."""
    found = [*model.variables, *model.metrics_variables]
    for optimizer in optimizers_of(model).values():
        found += optimizer.variables
    # Keras compares variables by value, so that no set holds them.
    return list({id(variable): variable for variable in found}.values())


def variable_scope(model):
    """Returns the context in which to make variables for `model`.

    TensorFlow's, of the model's strategy; replicas would share what is made
    outside of it.
    """
    strategy = getattr(model, "distribute_strategy", None)
    return strategy.scope() if strategy else contextlib.nullcontext()


def shape_in_fit(array) -> tuple:
    """Returns the shape, and the name of the dtype that `fit` casts it to."""
    dtype = keras.backend.standardize_dtype(array.dtype)
    is_float = "float" in dtype
    return array.shape, keras.config.floatx() if is_float else dtype


_MOST = 256
_KNOWN = {}


def program(text: Hashable, compile_it: Callable):
    """Returns the program of a text, compiled unless it is known.

    Args:
        text: All that the program does; equal texts are equal programs.
        compile_it: Function without arguments that returns the program.
    """
    found = _KNOWN.pop(text, None) or compile_it()
    _KNOWN[text] = found
    if len(_KNOWN) > _MOST:
        # The one used longest ago.
        del _KNOWN[next(iter(_KNOWN))]
    return found


def agreed(model: keras.Model, numbers: list) -> np.ndarray:
    """Returns, for each number, the largest that any worker has for it.

    Every worker must call this.

    Args:
        model: The model that they train together.
        numbers: List of numbers, or booleans.

    Returns:
        A float32 array.
    """
    values = np.array(numbers, "float32")
    return active.processes().agree(model, values)


def any_worker(model: keras.Model, flags: list) -> list:
    """Returns what `agreed` does, as a list."""
    return agreed(model, flags).tolist()
