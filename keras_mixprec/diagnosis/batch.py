"""Prepares the batch of a diagnosis, and selects the rows to examine."""

import math
import warnings
from collections.abc import Iterator

import keras
import numpy as np
from keras import ops, tree
from keras.config import floatx

from keras_mixprec.backend import active
from keras_mixprec.backend.common import build_optimizer, variable_scope
from keras_mixprec.diagnosis.criterion import step_criterion
from keras_mixprec.diagnosis.culprit import low_layers
from keras_mixprec.diagnosis.scales import scale_in_use
from keras_mixprec.formats import get_format
from keras_mixprec.keras_internals import (
    build_symbolically,
    compiled_loss,
    compute_output_spec,
    flat_layers,
)
from keras_mixprec.numerics.arrays import detached, is_float, to_array
from keras_mixprec.numerics.dry_step import NotBuiltError, single_step
from keras_mixprec.numerics.layer_hooks import in_float32
from keras_mixprec.policies.layers import has_own_loss, has_own_step


def build_for(model, data: tuple):
    """Builds the model and optimizers, as the first batch of `fit` would.

    Args:
        model: A compiled `keras.Model`.
        data: Tuple from `to_tensors`.

    Raises:
        NotBuiltError: If calling the model does not build it.
    """
    with variable_scope(model):
        if not _needs_no_call(model):
            try:
                _build_by_call(model, lambda: build_symbolically(model, data))
            except active.replay().REFUSALS:
                if not _all_built(model):
                    raise
                # Build in float32, because a metric may raise an error in 16
                # bits. Skip a model with a custom `train_step`, which may call
                # the model on parts of the batch, such as the two images of a
                # pair.
                if not has_own_step(model):
                    with in_float32(model):
                        build_symbolically(model, data)
    build_optimizer(model)


def trains_without_targets(model: keras.Model, x) -> bool:
    """Returns whether `fit(x)`, without `y`, would train a model.

    A model that computes its own loss in `train_step`, `compute_loss` or
    `add_loss` may need no targets. An autoencoder is an example. To find out,
    this function takes a step without targets.

    Args:
        model: A `keras.Model`.
        x: One batch of inputs, as tensors.
    """
    if not getattr(model, "compiled", False):
        return False
    if _needs_no_call(model):
        return True
    own = has_own_step(model) or has_own_loss(model)
    if compiled_loss(model) is not None and not own:
        return False
    batch = keras.utils.pack_x_y_sample_weight(x)
    try:
        build_for(model, (x, None, None))
        with active.processes().single_process(model), in_float32(model):
            step = single_step(model, batch, 1.0)
    except Exception:  # User code may fail in any way if `y` is missing.
        return False
    # JAX also runs a step without a loss, so look for nonzero gradients.
    return any(to_array(gradient).any() for gradient in step.gradients.values())


def build_for_predict(model, x):
    """Builds the model, as the first batch of `predict` would.

    Args:
        model: A `keras.Model`, compiled or not.
        x: One batch of inputs, as tensors.

    Raises:
        NotBuiltError: If calling the model does not build it.
    """
    if not all(part.built for part in flat_layers(model)):
        with variable_scope(model):
            _build_by_call(model, lambda: _called_symbolically(model, x))


def _called_symbolically(model, x):
    """Builds a model as `build_symbolically` does, without loss or metrics."""

    def spec(leaf):
        dtype = keras.backend.standardize_dtype(leaf.dtype)
        return keras.KerasTensor(leaf.shape, dtype)

    try:
        compute_output_spec(model, tree.map_structure(spec, x))
    except ValueError:
        # Raise Keras' own error, whose message explains the faulty inputs.
        raise
    except Exception as error:
        raise RuntimeError(str(error)) from error


def _build_by_call(model, build):
    unbuilt = [part for part in flat_layers(model) if not part.built]
    # Raise an error first, because Keras would mark a model as built although
    # the model has no `call`.
    if type(model).call is keras.Model.call:
        raise NotBuiltError(_not_built(model, "it has no `call`"))
    try:
        with warnings.catch_warnings():
            # Hide Keras' long warning about unbuilt layers. `NotBuiltError`
            # says the same in fewer words.
            warnings.filterwarnings("ignore", _PARAGRAPHS, UserWarning)
            build()
    except RuntimeError as error:
        # The model, its loss or a metric may mix dtypes. The diagnosis explains
        # such errors later, so build in float32 here.
        try:
            with in_float32(model):
                build()
            return
        except RuntimeError:
            if not unbuilt:
                raise
        for part in unbuilt:
            part.built = bool(part.weights)
        raise NotBuiltError(_not_built(model, "calling it fails")) from error


# A pattern for Keras' warning about layers that Keras cannot build.
_PARAGRAPHS = r"(?s).*looks like it has unbuilt state"


def _not_built(model, why):
    return (
        f"The model {model.name!r} is not built, and {why}. Build its layers "
        "first by calling them on a batch."
    )


def _needs_no_call(model):
    """Returns whether a model has no `call`, and all its layers are built."""
    no_call = type(model).call is keras.Model.call
    return no_call and _all_built(model)


def _all_built(model):
    parts = flat_layers(model, include_self=False)
    return all(part.built for part in parts)


# The maximum number of rows to examine. 64 rows show whether a layer is
# numerically stable, and more rows would take longer.
_ROWS = 64


def head(model: keras.Model, batch):
    """Returns the first rows of a batch, or all if it cannot be cut.

    A batch of graphs cannot be cut, because its edges refer to nodes by number.
    A batch cannot be cut either if the model has a fixed batch size, or keeps
    state by row.

    Args:
        model: The `keras.Model`.
        batch: As `train_step` takes it.
    """
    if len(set(_rows(batch))) > 1 or _has_fixed_rows(model):
        return batch
    try:
        return tree.map_structure(
            lambda leaf: leaf[:_ROWS] if _rows(leaf) else leaf, batch
        )
    except Exception:  # Sparse tensors cannot be cut.
        return batch


def _has_fixed_rows(model):
    return any(
        (getattr(layer, "batch_shape", None) or (None,))[0] is not None
        if isinstance(layer, keras.layers.InputLayer)
        else getattr(layer, "stateful", False)
        for layer in flat_layers(model)
    )


def _rows(structure) -> list:
    """Returns the number of rows of each tensor or array that has rows."""
    leaves = tree.flatten(structure)
    shapes: list = [getattr(leaf, "shape", ()) for leaf in leaves]
    return [shape[0] for shape in shapes if len(shape)]


def packed(data: tuple, like=()):
    """Returns a batch as `fit` hands it to `train_step`.

    Args:
        data: Tuple from `to_tensors`.
        like: Another batch of this `fit`. If it is a list, as from torch's
            `DataLoader`, so is the result. Defaults to `()`.
    """
    batch = keras.utils.pack_x_y_sample_weight(*data)
    if not isinstance(like, list):
        return batch
    return [*batch] if isinstance(batch, tuple) else [batch]


def of_tensors(batch, model: keras.Model):
    """Returns a batch with tensors in place of arrays.

    Args:
        batch: As `train_step` takes it.
        model: As for `to_tensors`.
    """
    parts = keras.utils.unpack_x_y_sample_weight(batch)
    return packed(to_tensors(parts, model), like=batch)


def to_tensors(
    data: tuple, model: keras.Model | None = None, *, as_in_fit: bool = False
) -> tuple:
    """Returns `(x, y, sample_weight)` as tensors.

    Args:
        data: Tuple of the three, each an array or a structure of arrays and
            numbers.
        model: The `keras.Model` that takes the batch. If the model has its own
            `train_step`, the parts may differ in their number of samples.
            Defaults to `None`.
        as_in_fit: Boolean, whether to cast floats to the dtype `floatx`, as
            `fit` does. Defaults to `False`.

    Raises:
        ValueError: If `data` is not one batch.
    """
    tensors, sizes = [], {}
    convert = _as_in_fit if as_in_fit else _to_tensor
    for name, part in zip(("x", "y", "sample_weight"), data, strict=True):
        try:
            tensors.append(tree.map_structure(convert, part))
            for rows in _rows(tensors[-1]):
                sizes[name] = rows
        except (TypeError, ValueError) as error:
            raise ValueError(_not_a_batch(name, part)) from error
    if not sizes.get("x"):
        raise ValueError(_not_a_batch("x", data[0]))
    # In a batch of graphs, a row is a node or an edge, so the numbers of rows
    # may differ between tensors.
    one_size = len(set(_rows(tensors[0]))) == 1
    aligned = one_size and (model is None or not has_own_step(model))
    if aligned and len(set(sizes.values())) > 1:
        raise ValueError(
            "All parts of the batch must have the same number of samples. "
            f"Received: {sizes}"
        )
    return tuple(tensors)


def nonfinite_rows(**parts) -> dict:
    """Returns the rows of a batch that hold infinity or NaN.

    Args:
        **parts: Structures of tensors, by name.

    Returns:
        Dict such as `{"rows_of_x['age']": [3, 5]}` with up to eight rows of
        each tensor. A key `"columns_of_..."` lists columns that are non-finite
        in all rows.
    """
    found = {}
    for name, tensor in named_leaves(**parts):
        if not is_float(tensor):
            continue
        bad = np.atleast_1d(~np.isfinite(to_array(tensor)))
        rows = bad.reshape(len(bad), -1).any(axis=1)
        if rows.any():
            found[f"rows_of_{name}"] = np.flatnonzero(rows)[:8].tolist()
        columns = bad.reshape(-1, bad.shape[-1]).all(axis=0)
        if bad.ndim > 1 and columns.any() and not columns.all():
            places = np.flatnonzero(columns)[:8].tolist()
            found[f"columns_of_{name}"] = places
    return found


def named_leaves(**parts) -> Iterator[tuple]:
    """Yields each array of a batch with its name, such as `"x['age']"`.

    Args:
        **parts: Structures of arrays, by name.
    """
    for name, part in parts.items():
        for path, leaf in tree.flatten_with_path(part):
            yield "".join([name, *(f"[{key!r}]" for key in path)]), leaf


def large_inputs(x) -> dict:
    """Returns the largest input that float16 cannot hold, and its range.

    Seconds since 1970 are an example. They overflow float16, and are too large
    for usual initial weights in float32.

    Args:
        x: Structure of tensors, the inputs.

    Returns:
        `{"input": "x['time']", "smallest_input": ..., "largest_input": ...}`,
        or an empty dict if all inputs fit.
    """
    found: dict = {}
    for name, leaf in named_leaves(x=x):
        tensor = _to_tensor(leaf)
        values = to_array(tensor) if is_float(tensor) else np.zeros(0)
        values = values[np.isfinite(values)]
        size = float(np.abs(values).max(initial=0.0))
        known = found.get("size", get_format("float16").maximum)
        if size > known:
            found = {
                "input": name,
                "smallest_input": float(values.min()),
                "largest_input": float(values.max()),
                "size": size,
            }
    found.pop("size", None)
    return found


def _to_tensor(leaf):
    if isinstance(leaf, (str, bytes)):
        raise TypeError("A string is not an array.")
    if leaf is None:
        return None
    return detached(ops.convert_to_tensor(leaf))


def _as_in_fit(leaf):
    # Only SciPy's sparse matrices have `toarray`.
    if hasattr(leaf, "toarray"):
        leaf = leaf.toarray()
    # Only pandas objects have `iloc`. A pandas series becomes one column.
    if hasattr(leaf, "iloc"):
        leaf = leaf.to_numpy().reshape(len(leaf), -1)
    tensor = _to_tensor(leaf)
    wide = tensor is not None and "float" in str(tensor.dtype)
    return ops.cast(tensor, floatx()) if wide else tensor


def _not_a_batch(name, part):
    arrays = isinstance(part, (str, list, tuple, dict, np.ndarray))
    many = not arrays and any(
        hasattr(part, method) for method in ("__iter__", "__getitem__")
    )
    hint = "Take one with `x, y = next(iter(data))`. " if many else ""
    return (
        f"`{name}` must be one batch of at least one sample: an array, or a "
        "list or dict of arrays as `model.train_on_batch` takes them. "
        f"{hint}Received: {name}={str(part)[:80]} of type {type(part).__name__}"
    )


# The powers of two by which to lower a dynamic loss scale. A step counts as
# wrong only if it is wrong at each of the lower loss scales too, because
# overflowing steps are skipped by design until the loss scale has fallen.
_BELOW = (0, 6, 12)


def rows_to_examine(model: keras.Model, batch):
    """Returns the first rows of a batch, or all if the whole batch fails.

    The whole batch fails if its loss or gradients are wrong in 16 bits. For
    example, a sum over all rows overflows, or a number in a later row does.

    Args:
        model: A compiled `keras.Model`.
        batch: As `train_step` takes it.
    """
    few = head(model, batch)
    if _rows(few) == _rows(batch):
        return batch
    parts = keras.utils.unpack_x_y_sample_weight(batch)
    data = to_tensors(parts, model)
    build_for(model, data)
    with active.processes().single_process(model):
        data = packed(data, like=batch)
        return few if _is_sound(model, data) else batch


def loss_in_float32(model: keras.Model, batch) -> float:
    """Returns the loss of one step in float32.

    Args:
        model: A built and compiled `keras.Model`.
        batch: As `train_step` takes it.
    """
    batch = of_tensors(batch, model)
    with active.processes().single_process(model), in_float32(model):
        return single_step(model, batch, 1.0).loss


def _is_sound(model, data):
    if not low_layers(model):
        return True
    try:
        with in_float32(model):
            exact = single_step(model, data, 1.0)
    # A later row may raise an error that the first rows do not raise, so
    # examine the whole batch.
    except active.replay().REFUSALS:
        return False
    # If the loss is not finite in float32, precision is not the cause, and the
    # first rows are enough.
    if not math.isfinite(exact.loss):
        return True
    criterion = step_criterion(model, data, exact)
    scale = scale_in_use(model)
    tries = _BELOW if scale.adapts else _BELOW[:1]
    return any(
        _fits(criterion, model, data, scale.bits - below) for below in tries
    )


def _fits(criterion, model, data, bits):
    try:
        step = single_step(model, data, 2.0**bits)
    except active.replay().REFUSALS:
        return False
    return criterion.fits(step)
