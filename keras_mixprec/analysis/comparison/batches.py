"""The batches that every policy is trained on: the same, in the same order."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import keras
from keras import tree

from keras_mixprec.analysis.comparison.sources import resolve
from keras_mixprec.numerics.arrays import as_numpy


class Batches:
    """Batches that are read once, and repeated as often as needed.

    Args:
        batches: List of tuples `(x,)`, `(x, y)` or `(x, y, sample_weight)`.
        arrays: The tuple of arrays that all of them were cut from, if so.

    Attributes:
        batches: That list.
    """

    def __init__(self, batches: list, arrays: tuple | None = None):
        self.batches = batches
        self._arrays = arrays

    def fit_arguments(self, steps: int) -> dict[str, Any]:
        """Returns how to tell `fit` to train on `steps` of them an epoch.

        Where that is once through arrays, on these, as a caller would: on torch
        each kind of data draws from the generator that dropout draws from.
        """
        if self._arrays is not None and steps == len(self.batches):
            names = "x", "y", "sample_weight"
            given = dict(zip(names, self._arrays, strict=False))
            return {**given, "batch_size": samples(self.batches[0])}
        return {"x": self._repeated(), "steps_per_epoch": steps}

    def samples_per_step(self, steps: int) -> float:
        """Returns the mean number of samples of the first `steps` batches."""
        counts = map(samples, itertools.islice(self._repeated(), steps))
        return sum(counts) / steps

    def _repeated(self):
        # Keras takes generators, and no other iterators.
        while True:
            yield from self.batches


def samples(batch: tuple) -> int:
    """Returns the number of samples of a batch."""
    leaf = next(leaf for leaf in tree.flatten(batch) if leaf is not None)
    return int(leaf.shape[0])


def read_batches(
    name: str, data: Any, batch_size: int, most: int | None = None
) -> Batches:
    """Reads what a caller has handed over as data.

    Args:
        name: String. The argument's name as the caller typed it.
        data: Arrays, an iterable of batches, a function that returns either,
            or where that can be imported from.
        batch_size: Int. Samples per batch of arrays.
        most: Int. How many batches to read. Defaults to `None`, all.

    Raises:
        TypeError: If it is none of these.
        ValueError: If there is no batch in it, or arrays do not go together.
    """
    data = resolve(name, data)
    if callable(data) and not _iterable(data):
        data = data()
    arrays = None
    if isinstance(data, tuple | dict) or hasattr(data, "shape"):
        data = data if isinstance(data, tuple) else (data,)
        arrays = tree.map_structure(_to_array, data)
        batches = _sliced(name, arrays, batch_size)
    elif _iterable(data):
        batches = map(_batch, _items(data))
    else:
        raise TypeError(
            f"`{name}` must be arrays `(x, y)`, an iterable of batches such "
            "as a `tf.data.Dataset`, a `DataLoader` or a `PyDataset`, or a "
            f"function that returns one. Received: {name}={str(data)[:80]} of "
            f"type {type(data).__name__}"
        )
    found = list(itertools.islice(batches, most))
    if not found or not samples(found[0]):
        raise ValueError(
            f"`{name}` must have at least one batch of one sample. "
            f"Received: {name} of type {type(data).__name__} without any"
        )
    return Batches(found, arrays)


def _iterable(data):
    return isinstance(data, Iterable | keras.utils.PyDataset)


def _items(data):
    if isinstance(data, keras.utils.PyDataset):
        return (data[index] for index in range(data.num_batches))
    return iter(data)


def _sliced(name, data, size) -> Iterator[tuple]:
    counts = {len(leaf) for leaf in tree.flatten(data) if leaf is not None}
    if len(data) > 3 or len(counts) != 1:
        raise ValueError(
            f"`{name}` as arrays must be `(x, y)` or `(x, y, sample_weight)`, "
            "all with the same number of samples. Received: "
            f"{len(data)} part(s) of {sorted(counts)} samples"
        )
    for first in range(0, counts.pop(), size):
        part = slice(first, first + size)
        yield tree.map_structure(
            lambda leaf, part=part: leaf if leaf is None else leaf[part], data
        )


def _batch(batch):
    """What Keras' adapters make of a batch: a tuple of arrays."""
    batch = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    return tree.map_structure(_to_array, batch)


def _to_array(leaf):
    # Ragged and sparse tensors are no arrays, and go to `fit` as they are.
    return as_numpy(leaf) if hasattr(leaf, "__array__") else leaf
