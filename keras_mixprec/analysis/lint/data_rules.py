"""Rules about what a model is fed: `x`, `y`, and the inputs of its graph."""

import keras
import numpy as np
from keras import layers

from keras_mixprec.analysis.lint.findings import Finding
from keras_mixprec.analysis.lint.rule import rule, to_float32
from keras_mixprec.formats import SIXTEEN_BITS, get_format
from keras_mixprec.keras_internals import inbound_nodes, producer

# Numbers that are cast at a time.
_PIECE = 1 << 16

# Rounding that is more than this share of a standard deviation is a loss.
_LOST = 0.05


@rule("high")
def ids_as_floats(view):
    """A layer in 16 bits before an `Embedding` rounds ids that are floats."""
    low = {id(entry.layer): entry for entry in view.low}
    for layer in [e.layer for e in view.entries if _is_embedding(e)]:
        feeders, _ = view.neighbours.get(id(layer), ([], []))
        for entry in [low[id(x)] for x in feeders if id(x) in low]:
            dtype = entry.layer.compute_dtype
            exact = get_format(dtype).exact_integers
            if layer.input_dim > exact and _fed_floats(layer):
                yield Finding(
                    "high",
                    entry.path,
                    f"It hands {layer.input_dim:,} ids to {layer.name!r} in "
                    f"{dtype}, which holds every integer up to {exact:,} only: "
                    "above that ids become others.",
                    "Declare them as integers, "
                    "keras.Input(..., dtype='int32'), or let it compute in "
                    "float32.",
                    to_float32(entry.path, "it hands on ids"),
                    numbers={"ids": layer.input_dim, "exact_up_to": exact},
                )


@rule("medium")
def integers_as_floats(view):
    """Counters and ids that come as floats are rounded in 16 bits."""
    dtype = _narrowest(view)
    if dtype is None:
        return
    exact = get_format(dtype).exact_integers
    for name, array in view.inputs.items():
        if "float" not in str(array.dtype):
            continue
        largest = _largest_integer(array)
        if largest > exact:
            yield Finding(
                "medium",
                None,
                f"{name} holds integers up to {largest:g} as {array.dtype}; "
                f"{dtype} holds every integer up to {exact:,} only.",
                "Hand ids and positions over as integers; subtract an offset "
                "from dates and counters, or bring them to scale, in float32.",
                numbers={"input": name, "largest": largest},
            )


@rule("high")
def index_tensors_in_16_bits(view):
    """Ids in a 16-bit array are rounded before the model sees them."""
    for name, array in view.inputs.items():
        dtype = str(array.dtype)
        if dtype not in SIXTEEN_BITS:
            continue
        largest = _largest_integer(array)
        exact = get_format(dtype).exact_integers
        if largest > exact:
            yield Finding(
                "high",
                None,
                f"{name} holds integers up to {largest:g} in {dtype}, which "
                f"holds every integer up to {exact:,} only.",
                "Hand them over as int32.",
                numbers={"input": name, "largest": largest},
            )


@rule("high")
def targets_beyond_format(view):
    """An output in float16 cannot reach targets above 65504."""
    largest = _largest(view.targets)
    for entry in view.low:
        form = get_format(entry.layer.compute_dtype)
        if id(entry.layer) in view.output_layers and largest > form.maximum:
            yield Finding(
                "high",
                entry.path,
                f"Targets reach {largest:g}, and the model's output is in "
                f"{form.name}, which ends at {form.maximum:g}.",
                "Let this layer compute in float32, or bring the targets to "
                "scale.",
                to_float32(entry.path, f"targets reach {largest:g}"),
                numbers={"largest_target": largest},
            )


@rule("medium")
def inputs_beyond_format(view):
    """Inputs beyond the compute dtype of the first layer become infinite."""
    dtype = _narrowest(view)
    if dtype is None:
        return
    form = get_format(dtype)
    for name, array in view.inputs.items():
        if "float" not in str(array.dtype):
            continue
        largest = _largest({name: array})
        if largest > form.maximum:
            yield Finding(
                "medium",
                None,
                f"{name} reaches {largest:g}, and layers compute in "
                f"{form.name}, which ends at {form.maximum:g}.",
                "Bring it to scale before, or in a float32 layer.",
                numbers={"input": name, "largest": largest},
            )


@rule("high")
def rounded_inputs(view):
    """A cast to 16 bits rounds by more than what the numbers differ by."""
    dtype = _narrowest(view)
    for name, array in view.inputs.items() if dtype else ():
        if "float" not in str(array.dtype):
            continue
        flat = array.ravel(order="K")
        exact = flat[:: 1 + flat.size // _PIECE].astype("float64")
        with np.errstate(all="ignore"):
            off = exact.astype(dtype).astype("float64") - exact
        known = np.isfinite(off)
        if not known.any():
            continue
        error, spread = float(off[known].std()), float(exact[known].std())
        if error > _LOST * spread:
            yield Finding(
                "high",
                None,
                f"{name} reaches {np.abs(exact[known]).max():,.6g} and varies "
                f"by {spread:.2g}; in {dtype} it is off by {error:.2g}.",
                "Take off the mean in float32 or before training.",
                numbers={"input": name, "rounding": error, "deviation": spread},
            )


def _is_embedding(entry):
    return isinstance(entry.layer, layers.Embedding)


def _fed_floats(layer):
    """Whether an input of the graph from which a layer is fed is of floats.

    Tensors in between show the dtype of the layer that makes them, of integers
    as well.
    """
    waiting, seen = [layer], set()
    while waiting:
        operation = waiting.pop()
        if id(operation) in seen:
            continue
        seen.add(id(operation))
        if isinstance(operation, layers.InputLayer):
            if "float" in operation.dtype:
                return True
        else:
            waiting += [
                producer(tensor)
                for node in inbound_nodes(operation)
                for tensor in keras.tree.flatten(node.input_tensors)
            ]
    return False


def _narrowest(view):
    """The 16-bit dtype that inputs are cast to, float16 before bfloat16."""
    dtypes = {
        entry.layer.compute_dtype
        for entry in view.first_layers
        if entry.layer.autocast and entry.layer.compute_dtype in SIXTEEN_BITS
    }
    return max(dtypes, default=None)


def _largest_integer(array):
    """The largest magnitude in an array of integers, 0 of any other."""
    largest = 0.0
    for sizes in _magnitudes(array):
        if (sizes != np.rint(sizes)).any():
            return 0.0
        largest = max(largest, float(sizes.max()))
    return largest


def _largest(arrays):
    return max(
        (
            float(sizes.max(initial=0.0, where=np.isfinite(sizes)))
            for array in arrays.values()
            for sizes in _magnitudes(array)
        ),
        default=0.0,
    )


def _magnitudes(array):
    """Yields the magnitudes in an array piece by piece, to save memory."""
    if not any(kind in str(array.dtype) for kind in ("float", "int")):
        return
    flat = array.ravel(order="K")
    for start in range(0, flat.size, _PIECE):
        yield np.abs(flat[start : start + _PIECE].astype("float64"))
