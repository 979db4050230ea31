"""Finds why a step raises an error in 16 bits but runs in float32.

There are three reasons. The backend may lack an operation in 16 bits or refuse
to mix dtypes, a loss may refuse NaN, or a 16-bit float may have rounded an
index.
"""

import os
import re
import traceback
from collections.abc import Callable
from typing import Any

import keras

import keras_mixprec
from keras_mixprec._console import without_colours
from keras_mixprec.backend import active
from keras_mixprec.backend.user_code import line_of
from keras_mixprec.diagnosis.cause import check_forward
from keras_mixprec.diagnosis.criterion import largest, nonfinite
from keras_mixprec.diagnosis.culprit import (
    Culprit,
    computes_low,
    layers_of,
    low_layers,
    rounded_integers,
)
from keras_mixprec.diagnosis.search import smallest_set
from keras_mixprec.formats import SIXTEEN_BITS
from keras_mixprec.numerics.arrays import to_arrays
from keras_mixprec.numerics.calls import Interrupted
from keras_mixprec.numerics.layer_hooks import computing_in
from keras_mixprec.numerics.layer_replay import LayerReplay
from keras_mixprec.policies.layers import MODEL_PATH

# Names of dtypes in the backends' error messages.
_DTYPES = {
    "half": "float16",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float": "float32",
    "float32": "float32",
    "double": "float64",
    "float64": "float64",
}

_OURS = os.path.dirname(keras_mixprec.__file__)

# The maximum number of characters of an error message. Some messages would fill
# a page.
_LETTERS = 160

_WRAPPED = "Exception encountered when calling"


def without_what_raises(
    search: Callable,
    model: keras.Model,
    interrupt: Callable,
    compile_run: Callable | None,
) -> tuple[Any, list[Culprit]]:
    """Searches while layers that raise an error in 16 bits compute in float32.

    If the model's run is compiled, layers that fail only when XLA is off are
    not culprits. For example, `MaxPooling3D` in float16 runs on a CPU under
    XLA, but not in TensorFlow op by op.

    Args:
        search: Function without arguments, which raises if a run does.
        model: As for `why_it_raises`.
        interrupt: As for `why_it_raises`.
        compile_run: Function without arguments that compiles the run with XLA.
            `None` if XLA does not compile the model's run.

    Returns:
        Tuple of the result of `search` and the list of raising `Culprit`s.
    """
    raising: list[Culprit] = []
    # Layers that fail only when XLA is off are kept in float32, but are not
    # blamed.
    spared: list[Culprit] = []
    while True:
        with computing_in("float32", layers_of([*raising, *spared])):
            try:
                return search(), raising
            except active.replay().REFUSALS as error:
                compiled = compile_run is not None
                culprit = why_it_raises(model, interrupt, compiled)
                found = [culprit] if culprit else []
                if compiled and not found:
                    found = _refused_by_xla(model, error, compile_run)
                if not found:
                    raise
        alone = compiled and culprit and culprit.kind == "unsupported"
        runs = alone and _compiles(compile_run, layers_of(raising))
        (spared if runs else raising).extend(found)


def _compiles(compile_run, layers):
    """Returns whether XLA compiles a run with some layers in float32."""
    try:
        with computing_in("float32", layers):
            compile_run()
    except active.replay().REFUSALS:
        return False
    return True


def why_it_raises(
    model: keras.Model, interrupt: Callable, compiled: bool
) -> Culprit | None:
    """Returns a layer whose float32 lets a run of a model get further.

    Args:
        model: A built `keras.Model`.
        interrupt: Function without arguments that runs the model, and returns
            the result of `interruption`.
        compiled: Boolean, whether XLA compiles the run.

    Returns:
        A `Culprit`, or `None` if the run does not raise or no layer helps.
    """
    stop = interrupt()
    if stop is None:
        return None
    culprit = _wrong_before(stop, compiled)
    return culprit or _mended(model, interrupt, stop)


def _wrong_before(stop, compiled):
    """Returns the layer whose non-finite outputs make the step raise."""
    bad = [c for c in stop.calls if nonfinite(to_arrays(c.float_outputs))]
    for call in bad:
        culprit = computes_low(call.layer) and check_forward(call, compiled)
        if culprit:
            return culprit
    if not bad or not computes_low(bad[0].layer):
        return None
    # The layer computes correctly, so an enclosing model, such as a
    # `Sequential`, has cast the layer's input to infinity.
    fault = "cast_overflow", "forward", {}
    return Culprit(bad[0].path, [bad[0].layer], *fault)


def _mended(model, interrupt, stop):
    """Returns the smallest set of layers whose float32 gets the run further."""

    def is_further(layers):
        with computing_in("float32", layers):
            after = interrupt()
        return after is None or after.progress() > stop.progress()

    calls = _suspects(stop)
    ranks = {path: rank for rank, path in enumerate(calls)}
    found = _fewest(model, is_further, lambda e: ranks.get(e.path, len(ranks)))
    if not found:
        return None
    # Name the layer that was running when the error was raised, if it contains
    # all layers that must be float32. Otherwise, name the smallest layer that
    # contains all of them.
    holders = sorted([*calls, *found], key=len, reverse=True)
    holders = [call.path for call in stop.open[-1:]] + holders
    path = next((p for p in holders if _holds(p, found)), MODEL_PATH)
    return Culprit(path, [*found.values()], *_fault(stop, calls.get(path)))


def _holds(path, others):
    return all(f"{other}/".startswith(f"{path}/") for other in others)


def _fewest(model, fits, rank):
    """Returns the smallest set of layers that fits, as a dict from paths."""
    entries = sorted(low_layers(model), key=rank)
    layers = {entry.path: entry.layer for entry in entries}
    found = smallest_set(
        [*layers], lambda paths: fits([layers[p] for p in paths])
    )
    return {path: x for path, x in layers.items() if path in (found or ())}


def _refused_by_xla(model, error, compile_run):
    """Returns layers that XLA cannot compile in 16 bits, but that run op by op.

    TensorFlow fails on a bilinear `UpSampling2D` before a normalization
    (tensorflow/tensorflow#81273). JAX on a CPU fails on attention in float16,
    because it sums the products in float32.
    """

    def compiles(layers):
        return _compiles(compile_run, layers)

    # Try layers with weights last, because XLA compiles matrix products well.
    layers = _fewest(model, compiles, lambda e: bool(e.layer.weights))
    numbers = evidence(error)
    return [
        Culprit(path, [layer], "unsupported", None, numbers)
        for path, layer in layers.items()
    ]


def _suspects(stop: Interrupted):
    """Returns a dict from paths to calls, the most likely culprits first."""
    # If no layer was running, the error came from a backward pass or from code
    # outside layers. Suspect the layers that the backward pass has reached, and
    # then the layers that returned last.
    backward = [c for c in stop.calls if c.received and not c.nested]
    likely = stop.open[::-1] or [*backward, *stop.calls[::-1]]
    found: dict = {}
    for call in likely:
        found.setdefault(call.path, call)
    return found


def _fault(stop, call):
    """Returns the kind, the direction and the evidence."""
    numbers = evidence(stop.error)
    if call is not None and call.layer.compute_dtype in SIXTEEN_BITS:
        inputs = LayerReplay(call).cast_inputs
        rounded = rounded_integers(inputs, call.layer.compute_dtype)
        if rounded:
            numbers |= {"largest_input": largest(inputs)} | rounded
            return "precision_loss", "forward", numbers
    return "unsupported", None, numbers


def evidence(error: Exception) -> dict:
    """Returns the evidence in an exception, as the numbers of a `Culprit`.

    Args:
        error: The exception.
    """
    lines = [line.strip() for line in without_colours(str(error)).split("\n")]
    lines = [line for line in lines if line]
    # Drop the line that Keras adds before the message of a layer's error.
    if len(lines) > 1 and lines[0].startswith(_WRAPPED):
        lines = lines[1:]
    said = "".join(lines[:1])
    words = re.findall(r"\w+", said.lower())
    dtypes = {_DTYPES[word]: None for word in words if word in _DTYPES}
    mixed = {"mixed_dtypes": [*dtypes]} if len(dtypes) > 1 else {}
    raised = traceback.extract_tb(error.__traceback__)
    frames = [(f.filename, f.lineno or 0) for f in reversed(raised)]
    code = line_of(f for f in frames if not f[0].startswith(_OURS))
    own = {"code": code} if code else {}
    return {"error": said[:_LETTERS]} | mixed | own
