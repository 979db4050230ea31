"""The inputs that a conversion is checked on, batch by batch."""

from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from keras_mixprec.formats import format_count
from keras_mixprec.keras_internals import functional_of
from keras_mixprec.numerics.arrays import as_numpy


def calibration_batches(x: Any, batch_size: int) -> list[Any]:
    """Returns a list of batches of inputs.

    Args:
        x: As `model.predict` takes it: an array, a list or dict of arrays, or
            an iterable of batches, of which the inputs are taken.
        batch_size: Int. Samples per batch of arrays.

    Raises:
        TypeError: If it is none of these.
        ValueError: If there is no sample in it, or arrays do not go together.
    """
    if _is_iterable_of_batches(x):
        batches = [
            keras.utils.unpack_x_y_sample_weight(b)[0] for b in _items(x)
        ]
        batches = [tree.map_structure(_to_array, batch) for batch in batches]
    else:
        batches = list(_sliced(tree.map_structure(_to_array, x), batch_size))
    if not batches:
        raise ValueError(
            "`calibration` must have at least one sample. "
            f"Received: {_shown(x)}"
        )
    return batches


def check_count(batches: list[Any], model: keras.Model) -> None:
    """Raises if a list of arrays has more or fewer than a model has inputs.

    Keras takes the first ones, and says nothing.

    Args:
        batches: What `calibration_batches` returned.
        model: A `keras.Model`.

    Raises:
        ValueError: If it has.
    """
    functional = functional_of(model)
    if functional is None:
        return
    expected = len(functional.inputs)
    for batch in batches:
        if (
            isinstance(batch, list | tuple)
            and len(tree.flatten(batch)) != expected
        ):
            raise ValueError(
                f"`calibration` must have {format_count(expected, 'array')}, "
                "one for each input of the model. "
                f"Received: a {type(batch).__name__} of "
                f"{format_count(len(tree.flatten(batch)), 'array')}"
            )


def text_at_fault(batch: Any) -> str:
    """Returns a sentence on text that the backend lacks, empty if it has it.

    Args:
        batch: A batch of inputs.
    """
    texts = [a for a in tree.flatten(batch) if a.dtype.kind in "OUS"]
    if not texts or keras.backend.backend() == "tensorflow":
        return ""
    return (
        "Keras calls models on text with TensorFlow alone: convert the part "
        "behind `TextVectorization` or `StringLookup`, on what that returns."
    )


def to_tensors(batch: Any) -> Any:
    """Returns a batch as a model is called on it; text stays what it is."""

    def tensor(array):
        is_text = array.dtype.kind in "OUS"
        return array if is_text else ops.convert_to_tensor(array)

    return tree.map_structure(tensor, batch)


def _is_iterable_of_batches(x):
    plain = isinstance(x, list | tuple | dict | str | bytes)
    array = hasattr(x, "shape")
    dataset = isinstance(x, Iterable | keras.utils.PyDataset)
    return dataset and not plain and not array


def _items(x):
    if isinstance(x, keras.utils.PyDataset):
        return (x[index] for index in range(x.num_batches))
    return iter(x)


def _sliced(x, size) -> Iterator[Any]:
    counts = {len(leaf) for leaf in tree.flatten(x)}
    if len(counts) != 1:
        raise ValueError(
            "The arrays of `calibration` must have the same number of samples. "
            f"Received: {sorted(counts)} samples"
        )
    for first in range(0, counts.pop(), size):
        part = slice(first, first + size)
        yield tree.map_structure(lambda leaf, part=part: leaf[part], x)


def _to_array(leaf):
    array = as_numpy(leaf) if hasattr(leaf, "__array__") else leaf
    if not isinstance(array, np.ndarray) or not array.ndim:
        raise TypeError(
            "`calibration` must be inputs as `model.predict` takes them: an "
            "array, a list or dict of arrays, or an iterable of batches. "
            f"Received: {_shown(leaf)}"
        )
    return array


def _shown(value):
    return f"calibration={str(value)[:80]} of type {type(value).__name__}"
