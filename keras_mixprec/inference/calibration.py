"""The inputs that a conversion is checked on, batch by batch."""

from typing import Any

import keras
import numpy as np
from keras import ops, tree

from keras_mixprec.formats import format_count
from keras_mixprec.keras_internals import functional_of, get_data_adapter
from keras_mixprec.numerics.arrays import as_numpy


def calibration_batches(x: Any, batch_size: int, model: keras.Model) -> list:
    """Returns a list of batches of inputs, as arrays.

    Args:
        x: As `model.predict` takes it. Of a dataset the inputs are taken.
        batch_size: Int. Samples per batch of arrays.
        model: The `keras.Model`.

    Raises:
        ValueError: If Keras does not take it, there is no sample in it, or the
            number of arrays is not that of the inputs.
    """
    x = tree.map_structure(_text_as_tensor, x)
    adapter = get_data_adapter(x, batch_size=batch_size)
    batches = [
        tree.map_structure(as_numpy, keras.utils.unpack_x_y_sample_weight(b)[0])
        for b in adapter.get_numpy_iterator()
    ]
    if not batches:
        raise ValueError(
            "`calibration` must have at least one sample. "
            f"Received: calibration={str(x)[:80]}"
        )
    functional = functional_of(model)
    if functional is not None:
        _check_count(batches[0], len(functional.inputs))
    return batches


def _check_count(batch, expected):
    """Raises if there are too many arrays: Keras takes the first ones."""
    count = len(tree.flatten(batch))
    if isinstance(batch, list | tuple) and count != expected:
        raise ValueError(
            f"`calibration` must have {format_count(expected, 'array')}, "
            "one for each input of the model. "
            f"Received: a {type(batch).__name__} of "
            f"{format_count(count, 'array')}"
        )


def to_tensors(batch: Any) -> Any:
    """Returns a batch as a model is called on it."""
    return tree.map_structure(ops.convert_to_tensor, batch)


def _text_as_tensor(leaf):
    """An array of strings as Keras takes it."""
    if not isinstance(leaf, np.ndarray) or leaf.dtype.kind not in "OUS":
        return leaf
    if keras.backend.backend() != "tensorflow":
        raise ValueError(
            "Keras calls models on text with TensorFlow alone: convert the "
            "part behind `TextVectorization` or `StringLookup`, on what that "
            f"returns. Received: calibration={str(leaf)[:80]}"
        )
    return ops.convert_to_tensor(leaf)
