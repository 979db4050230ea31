"""`diagnose_call`: the diagnosis of any function that calls a model."""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from keras_mixprec.diagnosis.call_examination import (
    LoopRun,
    examine_calls,
    is_compiled,
)
from keras_mixprec.diagnosis.verdict import Verdict
from keras_mixprec.keras_internals import flat_layers
from keras_mixprec.numerics.forward_pass import RecordedCalls
from keras_mixprec.policies.layers import check_model


def diagnose_call(
    model: keras.Model, fn: Callable, *args: Any, **kwargs: Any
) -> list[Verdict]:
    """Finds precision faults in a function that calls a model.

    The function may be a loop that generates tokens, a sampler, `model.predict`
    or a KerasHub task's `generate`. `diagnose_call` records all calls of
    layers. It repeats calls with errors beyond rounding in float32, on the same
    inputs. `numbers["call"]` of a verdict is the layer's first call that
    failed: 3 for the third step of a loop that calls the layer once in each
    step. The search demotes each layer that it finds before it goes on.

    The function runs several times, operation by operation. Functions that it
    compiles also run operation by operation, and so do the bodies of
    `keras.ops.while_loop`, `scan`, `map` and `vectorized_map`. Weights, random
    state and compiled functions do not change.

    Args:
        model: A `keras.Model`, compiled or not.
        fn: Function that calls the model or its layers. It must do the same in
            each call.
        *args: Arguments of the function.
        **kwargs: Keyword arguments of the function.

    Returns:
        List of `Verdict`, as `diagnose` returns it, about the forward pass
        only. It is empty if nothing is wrong. If the function is not a method
        of the model, the verdicts do not consider XLA.

    Raises:
        TypeError: If `model` is not a `keras.Model`, or `fn` is not a function.
        ValueError: If `fn` calls no layer of the model, or an argument is an
            iterator, which can be read only once.

    Example:
    >>> class Grow(keras.layers.Layer):
    ...     def call(self, x):
    ...         return 100.0 * x
    >>> model = keras.Sequential([keras.Input((1,)), Grow(name="grow")])
    >>> plan = apply_policy(model, "mixed_float16", rules=[])
    >>> def loop(x, steps):
    ...     for _ in range(steps):
    ...         x = model(x)
    ...     return x
    >>> for v in diagnose_call(model, loop, np.ones((1, 1)), steps=4):
    ...     print(v.kind, v.layer, v.numbers["call"])
    forward_overflow grow 3
    """
    check_model(model)
    _check_function(fn, args, kwargs)
    calls = RecordedCalls(model, fn, args, kwargs)
    # The diagnosis reports overflow, so NumPy's warnings are redundant.
    with np.errstate(all="ignore"):
        if not all(layer.built for layer in flat_layers(model)):
            calls.tensors()  # Builds the layers, because it runs the function.
        own = getattr(fn, "__self__", None) is model
        compiled = own and is_compiled(model)
        given = {"args": _tensors(args), "kwargs": _tensors(kwargs)}
        found = examine_calls(calls, LoopRun, given, compiled)
        return [finding.verdict for finding in found]


def _check_function(fn, args, kwargs):
    if not callable(fn) or isinstance(fn, type):
        raise TypeError(
            "`fn` must be a function that calls the model, such as "
            f"`model.generate`. Received: fn={fn!r} of type {type(fn).__name__}"
        )
    for leaf in tree.flatten((args, kwargs)):
        if isinstance(leaf, Iterator):
            raise ValueError(
                "`fn` is called several times, so it cannot take an iterator. "
                f"Pass a list or a dataset. Received: {leaf!r}"
            )


def _tensors(structure):
    """Returns the float arrays of a structure, to look for bad rows."""
    leaves = tree.flatten(structure)
    arrays = [x for x in leaves if ops.is_tensor(x) or _is_array(x)]
    return [ops.convert_to_tensor(x) for x in arrays if len(x.shape)]


def _is_array(leaf):
    return isinstance(leaf, np.ndarray) and leaf.dtype.kind == "f"
