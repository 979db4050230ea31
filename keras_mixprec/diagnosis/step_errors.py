"""Why a step raises in 16 bits that runs in float32.

A backend that refuses to mix dtypes or has no such operation in 16 bits, a
loss that refuses NaN, or an index that a 16-bit float has rounded.
"""

import linecache
import os
import pathlib
import re
import traceback
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import keras_mixprec
from keras_mixprec._console import without_colours
from keras_mixprec.backend import active
from keras_mixprec.diagnosis.compare import largest
from keras_mixprec.diagnosis.culprit import (
    Culprit,
    computes_low,
    layers_of,
    low_layers,
    rounded_integers,
)
from keras_mixprec.diagnosis.forward import check_forward, is_cast_before
from keras_mixprec.diagnosis.smallest_set import smallest_set
from keras_mixprec.formats import SIXTEEN_BITS
from keras_mixprec.numerics.arrays import to_array
from keras_mixprec.numerics.interruption import Interrupted
from keras_mixprec.numerics.layer_hooks import computing_in, with_sublayers
from keras_mixprec.numerics.layer_replay import LayerReplay
from keras_mixprec.policies.layers import MODEL_PATH

# Where no line is the user's: Keras, the backends beside it, this package.
_OTHERS = (
    str(pathlib.Path(keras.__file__).parents[1]),
    str(pathlib.Path(keras_mixprec.__file__).parent),
    str(pathlib.Path(os.__file__).parent),
)


def user_line(error: Exception) -> dict:
    """Returns where an exception comes from.

    Args:
        error: The exception.

    Returns:
        `{"line": "model.py:31", "code": "return mean + noise"}` of the
        innermost line of the user's own, an empty dict if there is none.
    """
    for frame, number in reversed([*traceback.walk_tb(error.__traceback__)]):
        name = frame.f_code.co_filename
        code = linecache.getline(name, number).strip()
        if code and not name.startswith(_OTHERS):
            return {"line": f"{os.path.basename(name)}:{number}", "code": code}
    return {}


# What messages call dtypes.
_DTYPES = {
    "half": "float16",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float": "float32",
    "float32": "float32",
    "double": "float64",
    "float64": "float64",
}

# Of an error's message, which may be a page.
_LETTERS = 160

_WRAPPED = "Exception encountered when calling"

# A model, and a layer that feeds what it computes itself.
_PAIR = 2

# How many layers are tried that were called before code outside of all raised.
_LAST = 4


def without_what_raises(
    search: Callable,
    model: keras.Model,
    interrupt: Callable,
    calls: list,
    compile_run: Callable | None,
) -> tuple[Any, list[Culprit]]:
    """Returns what a search finds, and the culprits without which it runs.

    Not among them is what only single operations refuse, where the run is
    compiled: TensorFlow has no `MaxPooling3D` in float16 on a CPU, XLA has.

    Args:
        search: Function without arguments, which raises if a run does.
        model: As for `why_it_raises`.
        interrupt: As for `why_it_raises`.
        calls: As for `why_it_raises`.
        compile_run: Function without arguments that compiles the run with XLA,
            as the model's own is compiled; `None` if that is not.
    """
    raising: list[Culprit] = []
    # What runs in XLA alone is left in float32 meanwhile, and not at fault.
    spared: list[Culprit] = []
    while True:
        with computing_in("float32", layers_of([*raising, *spared])):
            try:
                return search(), raising
            except active.replay().REFUSALS as error:
                compiled = compile_run is not None
                culprit = why_it_raises(model, interrupt, calls, compiled)
                found = [culprit] if culprit else []
                if compiled and not found:
                    found = _refused_by_xla(model, error, compile_run)
                if not found:
                    raise
        alone = compiled and culprit and culprit.kind == "unsupported"
        runs = alone and _compiles(compile_run, layers_of(raising))
        (spared if runs else raising).extend(found)


def _compiles(compile_run, layers):
    """Whether XLA compiles a run with some layers in float32."""
    try:
        with computing_in("float32", layers):
            compile_run()
    except active.replay().REFUSALS:
        return False
    return True


def why_it_raises(
    model: keras.Model, interrupt: Callable, calls: list, compiled: bool
) -> Culprit | None:
    """Returns a layer without which a run of a model gets further.

    Args:
        model: A built `keras.Model`.
        interrupt: Function without arguments that runs it, and returns what
            `interruption` does.
        calls: List of the `LayerCall`s of the run in float32.
        compiled: Boolean. Whether XLA compiles the run.

    Returns:
        A `Culprit`, `None` if the run does not raise or no layer is found.
    """
    stop = interrupt()
    if stop is None:
        return None
    known = {call.name: call for call in calls}
    culprit = _wrong_before(stop, known, compiled)
    return culprit or _mended(model, interrupt, stop)


def _wrong_before(stop, known, compiled):
    """The layer that has returned what the step then stumbles over."""
    suspects = [
        c for c in stop.calls if computes_low(c.layer) and not _is_finite(c)
    ]
    for call in suspects:
        culprit = check_forward(call, compiled)
        if culprit is not None:
            return culprit
    return _cast_before(stop, known)


def _cast_before(stop, known):
    """The first layer to go wrong, if what it is in has cast its input."""
    call = next((c for c in stop.calls if not _is_finite(c)), None)
    if call is None or not computes_low(call.layer):
        return None
    exact = known.get(call.name)
    if not is_cast_before(call, exact):
        return None
    inputs = [to_array(x) for x in LayerReplay(exact).inputs]
    numbers = {"largest_input": largest(inputs)}
    return Culprit(call.path, [call.layer], "cast_overflow", "forward", numbers)


def _is_finite(call):
    outputs = call.float_outputs
    return all(np.isfinite(to_array(x)).all() for x in outputs)


def _mended(model, interrupt, stop):
    """The layer in which it raises, or that feeds the code that does."""

    def is_further(layers):
        with computing_in("float32", layers):
            after = interrupt()
        return after is None or after.progress() > stop.progress()

    suspects = _suspects(stop)
    for path, call in {**suspects, MODEL_PATH: None}.items():
        fed_by = [] if call else [c.layer for c in suspects.values()]
        for layers in _choices(call.layer if call else model, fed_by):
            if is_further(layers):
                if call is None and len(layers) > _PAIR:
                    layers = [*_together(model, is_further)] or layers
                return Culprit(path, layers, *_fault(stop, call))
    return None


def _fewest(model, is_further, is_unlikely):
    """The fewest layers of a model that together let it get further.

    A dict from their paths; empty if none do.
    """
    layers = {e.path: e.layer for e in low_layers(model)}
    layers.pop(MODEL_PATH, None)
    ranked = sorted(layers, key=lambda path: is_unlikely(layers[path]))
    found = smallest_set(
        ranked, lambda paths: is_further([layers[p] for p in paths])
    )
    return {path: x for path, x in layers.items() if path in (found or ())}


def _together(model, is_further):
    """Such as two with an `activity_regularizer`.

    TensorFlow does not add up losses of several dtypes.
    """
    found = _fewest(
        model, is_further, lambda layer: not layer.activity_regularizer
    )
    return found.values()


def _refused_by_xla(model, error, compile_run):
    """The layers that XLA refuses in 16 bits, though they run one by one.

    As the gradients of a bilinear `UpSampling2D` before a normalization on
    TensorFlow (tensorflow/tensorflow#81273), or attention's products of float16
    that are added up in float32 on a CPU with JAX.
    """

    def compiles(layers):
        return _compiles(compile_run, layers)

    # Products of weights are what XLA is made for.
    layers = _fewest(model, compiles, lambda layer: bool(layer.weights))
    numbers = evidence(error)
    return [
        Culprit(path, [layer], "unsupported", None, numbers)
        for path, layer in layers.items()
    ]


def _suspects(stop: Interrupted):
    """Dict of paths and calls, the likely ones first."""
    likely = stop.open[::-1]
    if not likely:
        # A backward pass ends in the earliest layer that it has come to.
        backward = [c for c in stop.calls if c.received and not c.nested]
        last = sorted(stop.calls[: -_LAST - 1 : -1], key=lambda c: c.nested)
        likely = [*backward[:_LAST], *_ends(stop.calls), *last]
    likely = [call for call in likely if computes_low(call.layer)]
    return {call.path: call for call in likely}


def _ends(calls):
    """The last layer within each model or composite, the last first."""
    pairs = zip(calls, calls[1:], strict=False)
    return [call for call, outer in pairs if outer.nested][::-1]


def _choices(layer, fed_by):
    """What to demote, the least first: code of its own with what feeds it."""
    inside = with_sublayers(layer)
    if not any(map(computes_low, inside)):
        return []
    choices = [[layer], *([layer, other] for other in fed_by), inside]
    return choices if len(inside) > 1 else [inside]


def _fault(stop, call):
    """Kind, direction and evidence."""
    numbers = evidence(stop.error)
    if call is not None and call.layer.compute_dtype in SIXTEEN_BITS:
        inputs = LayerReplay(call).cast_inputs
        rounded = rounded_integers(inputs, call.layer.compute_dtype)
        if rounded:
            numbers |= {"largest_input": largest(inputs)} | rounded
            return "precision_loss", "forward", numbers
    return "unsupported", None, numbers


def evidence(error: Exception) -> dict:
    """Returns what an exception says, as the numbers of a `Culprit`.

    Args:
        error: The exception.
    """
    lines = [line.strip() for line in without_colours(str(error)).split("\n")]
    lines = [line for line in lines if line]
    # What Keras puts before the message of an error in a layer's call.
    if len(lines) > 1 and lines[0].startswith(_WRAPPED):
        lines = lines[1:]
    said = "".join(lines[:1])
    words = re.findall(r"\w+", said.lower())
    dtypes = {_DTYPES[word]: None for word in words if word in _DTYPES}
    mixed = {"mixed_dtypes": [*dtypes]} if len(dtypes) > 1 else {}
    return {"error": said[:_LETTERS]} | mixed | user_line(error)
