"""Checks whether outputs can reach the targets, and whether the loss fits.

The monitor and lint run this check before the first step, because no dtype
repairs such a fault. Depending on the backend, the fault raises an error, gives
NaN, or gives a meaningless loss.
"""

import math
import re
import warnings
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops, tree

from keras_mixprec.diagnosis.verdict import Verdict
from keras_mixprec.keras_internals import (
    ACTIVATIONS,
    compute_output_spec,
    flat_layers,
    flat_losses,
    functional_of,
    inbound_nodes,
    only_runs_graph,
    producer,
)
from keras_mixprec.numerics.arrays import as_numpy
from keras_mixprec.policies.graph import consumers
from keras_mixprec.policies.layers import (
    has_own_loss,
    has_own_step,
    is_of_keras,
)
from keras_mixprec.verdict_kinds import KINDS

_SPARSE = "sparse_categorical_crossentropy"
_CATEGORICAL = "categorical_crossentropy", "categorical_focal_crossentropy"
_BINARY = "binary_crossentropy", "binary_focal_crossentropy"

# Names of losses that are smallest where the output equals the target.
_DISTANCES = re.compile("mean_(squared|absolute)|huber|log_cosh|poisson")

# The task is at fault if both of these hold: the outputs cannot reach at least
# this share of the targets, and even the closest possible outputs leave at
# least this share of the squared error of the best constant output.
_OUT_OF_REACH = 0.25

# The maximum number of elements of an array to check, and the maximum number of
# rows to name.
_NUMBERS, _ROWS = 1 << 16, 8

# Numbers on which to try an activation, with -1 first. Outputs beyond
# `_ENDLESS` count as unbounded.
_TRIED = np.r_[-1.0, np.linspace(-30, 30, 121), -1e4, -1e2, 1e2, 1e4]
_ENDLESS = 1e3

# Inputs that reach this limit count as not normalized. So do inputs with
# columns whose spreads differ by this factor. Pixels reach only 255.
_LARGE = 1e4


class TaskFault(NamedTuple):
    """A fault of the training task: its data, loss or last activation.

    Attributes:
        kind: String. The kind of the verdict.
        numbers: Dict. The evidence.
        fix: String. The advice, in one sentence.
    """

    kind: str
    numbers: dict
    fix: str = ""

    def verdict(self, step: int) -> Verdict:
        """Returns the verdict, found after `step` steps."""
        text = KINDS[self.kind].advice.format(fix=self.fix, **self.numbers)
        return Verdict(self.kind, step=step, numbers=self.numbers, advice=text)


class _Reach(NamedTuple):
    """The range of an activation, and its sum over units for inputs of -1."""

    low: float
    high: float
    sum_below_zero: float

    def __str__(self):
        if self.low == self.high:
            return f"of {self.low:g} only"
        if math.isinf(self.low):
            return "of any size"
        if math.isinf(self.high):
            return f"from {self.low:.3g} up"
        return f"from {self.low:.3g} to {self.high:.3g}"


class _Output(NamedTuple):
    """An output with its loss, its targets and a mask of their rows in `y`."""

    name: str
    loss: Any
    function: str
    shape: tuple
    reach: _Reach | None
    targets: np.ndarray
    kept: np.ndarray
    is_padded: bool


def task_faults(
    model: keras.Model, x: Any, y: Any, sample_weight: Any = None
) -> list[TaskFault]:
    """Returns the parts of a task that no weights can learn.

    Only the losses of Keras are checked, because a custom loss may take any
    targets.

    Args:
        model: A compiled `keras.Model`.
        x: Inputs, as `fit` takes them: one batch, or all data.
        y: The targets of these samples.
        sample_weight: The sample weights. Defaults to `None`.
    """
    if has_own_step(model) or has_own_loss(model) or y is None:
        return []
    weights = [_array(leaf) for leaf in tree.flatten(sample_weight)]
    if weights and all(w is not None and not w.any() for w in weights):
        fix = "Give some samples a weight above 0."
        return [_mismatch("any", "sample weights above 0", "only 0", fix)]
    outputs = _outputs(model, x, y, sample_weight)
    found = []
    for output in outputs:
        several = {"output": output.name} if len(outputs) > 1 else {}
        for fault in [*_of_targets(output), *_of_activation(output)][:1]:
            found.append(fault._replace(numbers=fault.numbers | several))
    return found


def inputs_not_normalized(model: keras.Model, x: Any) -> TaskFault | None:
    """Returns the first input that is too large, or has unequal columns.

    An input counts only if it goes straight to layers with a kernel. Inputs of
    a `Normalization`, an `Embedding` or the user's own code do not count. If
    the model learns, large inputs do no harm.

    Args:
        model: A `keras.Model`. Without a graph the check finds nothing.
        x: As for `task_faults`.
    """
    graph = _graph_of(model)
    inputs = list(graph.inputs) if graph else []
    known = {tensor.name: tensor for tensor in inputs}
    for place, (path, leaf) in enumerate(tree.flatten_with_path(x)):
        by_name = path and isinstance(path[-1], str)
        tensor = known.get(path[-1]) if by_name else [*inputs, None][place]
        values = _array(leaf)
        if tensor is None or values is None or values.ndim < 2:
            continue
        if not _meets_kernel(graph, tensor):
            continue
        step = 1 + values.size // _NUMBERS
        columns = _floats(values.reshape(-1, values.shape[-1])[::step])
        columns[~np.isfinite(columns)] = 0
        sizes, spreads = np.abs(columns).max(axis=0), np.ptp(columns, axis=0)
        varied = spreads[spreads > 0]
        ends = (varied.min(), varied.max()) if varied.size else (1.0, 1.0)
        if max(sizes.max(), ends[1] / ends[0]) < _LARGE:
            continue
        how = f"column {sizes.argmax()} reaches {sizes.max():.4g}"
        if ends[1] / ends[0] >= _LARGE:
            how += ", and columns vary by {:.3g} to {:.3g}".format(*ends)
        name = "".join(["x", *(f"[{key!r}]" for key in path)])
        numbers = {"input": name, "how": how}
        if constant := np.flatnonzero(spreads == 0)[:_ROWS].tolist():
            numbers["constant_columns"] = constant
        return TaskFault("not_normalized", numbers)
    return None


def negative_weights(sample_weight: Any) -> TaskFault | None:
    """Returns a fault if a sample weight is negative.

    Some losses are made for negative weights.

    Args:
        sample_weight: As for `task_faults`.
    """
    known = map(_array, tree.flatten(sample_weight))
    lowest = min((w.min() for w in known if w is not None), default=0)
    if lowest >= 0:
        return None
    fix = "Make them positive, unless the loss is meant to grow on such rows."
    given = f"weights down to {lowest:.4g}"
    return _mismatch("any", "sample weights from 0 up", given, fix)


def _of_targets(output):
    """Yields targets that the loss does not take."""
    name, targets, units = output.function, output.targets, output.shape[-1]
    given = f"targets of shape {_shape(targets.shape)}"
    count = math.prod(targets.shape[1:])
    if name == _SPARSE and targets.shape[1:] == output.shape[1:] and units > 1:
        fix = "Pass loss='categorical_crossentropy', or y.argmax(-1) as y."
        yield _mismatch(name, "one class index per sample", given, fix)
    elif name == _SPARSE and not output.is_padded:
        yield from _class_indices(output)
    if name in _CATEGORICAL and count == 1 < units:
        takes = f"{units} numbers per sample, one for each class"
        fix = f"Pass loss={_SPARSE!r}, or keras.utils.to_categorical(y) as y."
        yield _mismatch(name, takes, given, fix)
    if name in _BINARY and not output.is_padded:
        values = _sample(targets)
        off = (values < -0.01) | (values > 1.01)
        whole = not np.mod(values, 1).any()
        if off.mean() > 0.01 or whole and off.any():
            fix = "Make them 0 and 1. For several classes, give the last layer "
            fix += f"one unit per class and pass loss={_SPARSE!r}."
            given = f"targets {_extent(values)}"
            yield _mismatch(name, "targets from 0 to 1", given, fix)
    if _DISTANCES.match(name) and math.prod(output.shape[1:]) == 1 < count:
        fix = f"Give the last layer an output for each of the {count} targets."
        shapes = _shape(output.shape), _shape(targets.shape)
        yield _unreachable(*(f"of shape {shape}" for shape in shapes), fix)


def _class_indices(output):
    classes = output.shape[-1]
    indices = output.targets.reshape(len(output.targets), -1)
    bad = (indices < 0) | (indices >= classes)
    if (ignored := getattr(output.loss, "ignore_class", None)) is not None:
        bad &= indices != ignored
    if not bad.any():
        return
    low, high = int(indices.min()), int(indices.max())
    fix = f"Repair these targets, or give the last layer {high + 1} units."
    if (low, high) == (1, classes):
        fix = "Subtract 1 from the targets: classes count from 0."
    elif classes == 1 == high:
        fix = "Give the last layer 2 units, or pass loss='binary_crossentropy'."
    elif high < classes:
        fix = "Repair these targets: classes count from 0."
    rows = np.flatnonzero(output.kept)[bad.any(axis=1)][:_ROWS].tolist()
    yield _mismatch(
        _SPARSE,
        f"class indices from 0 to {classes - 1}",
        f"indices from {low} to {high}",
        fix,
        targets_out_of_range=int(bad.sum()),
        first_rows_of_y=rows,
    )


def _of_activation(output):
    """Yields mismatches between the last activation, the loss and targets."""
    name, reach, targets = output.function, output.reach, output.targets
    if reach is None:
        return
    low, high, sum_below_zero = reach
    values = _sample(targets)
    if low == high and (values != low).any():
        fix = "Give the last layer activation='sigmoid', or one unit per class."
        yield _unreachable(reach, _extent(values), fix)
    of_classes = name == _SPARSE or name in _CATEGORICAL
    takes_logits = getattr(output.loss, "from_logits", False)
    given = f"outputs {reach}"
    # Keras divides class probabilities by their sum, so only the sum must be
    # positive.
    is_none = low < 0 or high > 1
    if of_classes:
        is_none = sum_below_zero <= 0
    if takes_logits and 0 <= low < high <= 1:
        fix = "Pass from_logits=False, or drop the last activation."
        yield _mismatch(name, "logits (from_logits=True)", given, fix)
    elif is_none and not takes_logits and (of_classes or name in _BINARY):
        last = "softmax" if of_classes else "sigmoid"
        fix = f"Pass from_logits=True, or end with activation={last!r}."
        yield _mismatch(name, "probabilities (from_logits=False)", given, fix)
    same = math.prod(targets.shape[1:]) == math.prod(output.shape[1:])
    if same and not output.is_padded and _DISTANCES.match(name):
        away = np.maximum(np.maximum(low - values, values - high), 0)
        best = np.clip(values.mean(), low, high)
        left = np.square(away).sum() / max(np.square(values - best).sum(), 1e-9)
        share = (away > 0.01 * np.ptp(values)).mean()
        if min(share, left) >= _OUT_OF_REACH:
            fix = "Give the last layer an activation that reaches them, such "
            fix += "as activation=None, or scale the targets into its range."
            yield _unreachable(reach, _extent(values), fix)


def _mismatch(loss, takes, given, fix, **numbers):
    numbers = {"loss": loss, "takes": takes, "given": given} | numbers
    return TaskFault("loss_mismatch", numbers, fix)


def _unreachable(outputs, targets, fix):
    numbers = {"outputs": str(outputs), "targets": targets}
    return TaskFault("unreachable_targets", numbers, fix)


def _extent(values):
    return f"from {values.min():.4g} to {values.max():.4g}"


def _shape(shape):
    return "(" + ", ".join(["n", *map(str, shape[1:])]) + ")"


# The functions below find the outputs of a model and their activations.


def _outputs(model, x, y, sample_weight) -> list[_Output]:
    outputs = tree.flatten_with_path(_specs(model, x))
    is_padded = any(map(_makes_masks, flat_layers(model)))
    names = getattr(model, "output_names", None) or [*map(str, outputs)]
    # A dict of losses may name the outputs of a model that returns a list, so
    # accept names and positions as keys.
    places = {(names[n],): n for n in range(len(outputs))}
    places |= {path: n for n, (path, _) in enumerate(outputs)}
    found = []
    for path, loss in flat_losses(model):
        function = getattr(loss, "fn", loss)
        known = getattr(function, "__module__", "").startswith("keras.")
        place = places.get(path)
        if not known or place is None or getattr(loss, "axis", -1) != -1:
            continue
        tensor = outputs[place][1]
        targets = _part(y, path, place, len(outputs))
        weights = _part(sample_weight, path, place, len(outputs))
        if targets is None or len(tensor.shape) < 2:
            continue
        kept = np.isfinite(_by_row(targets)).all(axis=1)
        if weights is not None and len(weights) == len(targets):
            kept &= _by_row(weights).any(axis=1)
        if kept.any():
            own = names[place], loss, function.__name__, tuple(tensor.shape)
            padded = is_padded and len(tensor.shape) > 2
            targets = targets if kept.all() else targets[kept]
            found.append(_Output(*own, _reach(tensor), targets, kept, padded))
    return found


def _specs(model, x):
    """Returns the outputs as symbolic tensors, from the graph if possible."""
    if graph := _graph_of(model):
        return graph.output

    def spec(leaf):
        dtype = keras.backend.standardize_dtype(leaf.dtype)
        return keras.KerasTensor((None, *leaf.shape[1:]), dtype)

    try:
        return compute_output_spec(model, tree.map_structure(spec, x))
    except Exception:  # User code may raise any kind of error.
        return ()


def _graph_of(model):
    """Returns the graph of a model that only runs a graph, else `None`."""
    alone = type(model).call is keras.Sequential.call or only_runs_graph(model)
    return functional_of(model) if alone else None


def _part(data, path, place, count):
    """Returns the targets or weights of one output as an array."""
    flat = tree.flatten_with_path(data)
    own = [leaf for key, leaf in flat if key == path]
    if len(flat) == count:
        own = own or [flat[place][1]]
    return _array(own[0]) if own else None


def _array(leaf):
    """Returns a leaf as an array, or `None` if it is not a dense array."""
    if not len(getattr(leaf, "shape", ())) or hasattr(leaf, "todense"):
        return None
    try:
        array = as_numpy(leaf)
    # Some targets, such as ragged tensors, cannot be converted to an array.
    except Exception:
        return None
    return array if array.dtype.kind in "fiub" and array.size else None


def _sample(array):
    return _floats(array.ravel()[:: 1 + array.size // _NUMBERS])


def _floats(array):
    return array.astype("float64")


def _by_row(array):
    return array.reshape(len(array), -1)


def _makes_masks(layer):
    masking = isinstance(layer, keras.layers.Masking)
    return masking or bool(getattr(layer, "mask_zero", False))


def _reach(tensor) -> _Reach | None:
    """Returns the range of the last activation, or `None`."""
    function = _last_function(tensor)
    if function is keras.activations.linear:
        return _Reach(-math.inf, math.inf, -1.0)
    if function is None:
        return None
    # Four units are enough for the test. A layer with one unit keeps one,
    # because the softmax of one unit is always 1.
    shape = [min(size or 2, 4) for size in tensor.shape[1:]]
    same = np.ones((len(_TRIED), *shape))
    same *= _TRIED.reshape(-1, *[1] * len(shape))
    mixed = np.random.default_rng(0).choice(_TRIED, same.shape)
    tried = ops.convert_to_tensor(np.concatenate([same, mixed]), "float32")
    try:
        with warnings.catch_warnings():
            # Hide Keras' warning about a softmax over one unit, because the
            # verdict reports such a softmax.
            warnings.simplefilter("ignore")
            found = _floats(ops.convert_to_numpy(function(tried)))
    # An activation may accept only the shape of the layer's output. The range
    # of such an activation stays unknown.
    except Exception:
        return None
    if np.isnan(found).any() or found.shape != tuple(tried.shape):
        return None
    low, high = float(found.min()), float(found.max())
    return _Reach(
        -math.inf if low < -_ENDLESS else low,
        math.inf if high > _ENDLESS else high,
        float(found[0].sum(axis=-1).min()),
    )


def _last_function(tensor):
    """Returns the last activation of a tensor, or `None` if it is unknown."""
    while operation := producer(tensor):
        inner = functional_of(operation)
        function = getattr(operation, "activation", None)
        is_activation = isinstance(operation, keras.layers.Activation)
        if inner is not None and len(inner.outputs) == 1:
            tensor = inner.outputs[0]
        elif is_activation and function is keras.activations.linear:
            (tensor,) = inbound_nodes(operation)[-1].input_tensors
        elif type(operation).__module__.startswith(ACTIVATIONS):
            return None if getattr(operation, "weights", ()) else operation.call
        else:
            wrapped = isinstance(operation, keras.layers.TimeDistributed)
            layer = operation.layer if wrapped else operation
            function = getattr(layer, "activation", None)
            return function if is_of_keras(layer) else None
    return None


def _meets_kernel(graph, tensor) -> bool:
    """Returns whether all layers that get an input of a graph multiply it."""
    found = consumers(graph, tensor)
    recurrent = keras.layers.RNN, keras.layers.Bidirectional
    return bool(found) and all(
        isinstance(layer, recurrent) or hasattr(layer, "kernel")
        for layer in found
    )
