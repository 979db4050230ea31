"""What the tensors of a graph are on a batch, in float32."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from keras import tree

from keras_mixprec.inference.calibration import to_tensors
from keras_mixprec.numerics.arrays import to_array
from keras_mixprec.numerics.layer_hooks import in_float32


def each_value(functional, tensors: list, x: Any) -> Iterator[np.ndarray]:
    """Yields the value of each tensor of a graph.

    One after the other: as arrays all activations of a batch are not to be
    in memory at once.

    Args:
        functional: A functional model.
        tensors: List of its symbolic tensors.
        x: One batch of inputs.
    """
    model = keras.Model(functional.input, tensors)
    with in_float32(functional):
        found = tree.flatten(model(to_tensors(x), training=False))
    while found:
        yield to_array(found.pop(0))


def outputs_of(functional, x: Any) -> list[np.ndarray]:
    """Returns the outputs of a graph.

    Args:
        functional: A functional model.
        x: One batch of inputs.
    """
    return list(each_value(functional, functional.outputs, x))
