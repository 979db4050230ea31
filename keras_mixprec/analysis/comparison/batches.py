"""The batches that every policy is trained on: the same, in the same order."""

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np
from keras import tree

from keras_mixprec.analysis.comparison.sources import resolve
from keras_mixprec.numerics.arrays import as_numpy


class Batches:
    """Batches that are read once, and repeated as often as needed.

    Args:
        batches: List of tuples `(x,)`, `(x, y)` or `(x, y, sample_weight)`.
        arrays: The tuple of arrays that all of them were cut from, if so.

    Attributes:
        batch_size: Int. Samples of the first.
    """

    def __init__(self, batches: list, arrays: tuple | None = None):
        self._batches = batches
        self._arrays = arrays
        self.batch_size = _samples(batches[0])

    def __len__(self):
        return len(self._batches)

    def __iter__(self) -> Iterator[tuple]:
        # Keras takes generators, and no other iterators.
        yield from self._batches

    @property
    def has_targets(self) -> bool:
        """Whether a batch is more than inputs."""
        return len(self._batches[0]) > 1

    def fit_arguments(self, steps: int) -> dict[str, Any]:
        """Returns how to tell `fit` to train on `steps` of them an epoch.

        Where that is once through arrays, on these, as a caller would: on torch
        each kind of data draws from the generator that dropout draws from.
        """
        if self._arrays is not None and steps == len(self):
            names = "x", "y", "sample_weight"
            given = dict(zip(names, self._arrays, strict=False))
            return {**given, "batch_size": self.batch_size}
        return {"x": self._repeated(), "steps_per_epoch": steps}

    def _repeated(self):
        while True:
            yield from self._batches

    def samples(self) -> int:
        """Returns the number of samples."""
        return sum(map(_samples, self._batches))

    def samples_per_step(self, steps: int) -> float:
        """Returns the mean number of samples of the first `steps` batches."""
        counts = map(_samples, itertools.islice(self._repeated(), steps))
        return sum(counts) / steps

    def digest(self) -> str:
        """Returns a string that differs if any number of them does."""
        found = hashlib.blake2b(digest_size=16)
        for leaf in tree.flatten(self._batches):
            array = np.asarray(
                leaf if hasattr(leaf, "__array__") else str(leaf)
            )
            if array.dtype == object:  # Texts, of which it has addresses.
                array = array.astype(str)
            found.update(f"{array.dtype}{array.shape}".encode())
            found.update(np.ascontiguousarray(array).tobytes())
        return found.hexdigest()


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
    if _is_arrays(data):
        arrays = tree.map_structure(_to_array, _tuple(data))
        batches = _sliced(name, arrays, batch_size)
    elif _iterable(data):
        _check_no_arrays(name, data)
        batches = map(_batch, _items(data))
    else:
        raise TypeError(
            f"`{name}` must be arrays `(x, y)`, an iterable of batches such "
            "as a `tf.data.Dataset`, a `DataLoader` or a `PyDataset`, or a "
            f"function that returns one. Received: {name}={str(data)[:80]} of "
            f"type {type(data).__name__}"
        )
    found = list(itertools.islice(batches, most))
    if not found or not _samples(found[0]):
        raise ValueError(
            f"`{name}` must have at least one batch of one sample. "
            f"Received: {name} of type {type(data).__name__} without any"
        )
    return Batches(found, arrays)


def _check_no_arrays(name, data):
    """Raises for a list of x and y, which otherwise were two batches."""
    if not isinstance(data, list) or len(data) > 3:
        return
    shapes = [getattr(item, "shape", None) for item in data]
    if all(shapes) and len({s[0] for s in shapes}) == 1 < len(set(shapes)):
        raise TypeError(
            f"`{name}` as arrays must be a tuple, `(x, y)`: the items of a "
            f"list are batches. Received: {name}=list of arrays of shapes "
            f"{', '.join(map(str, shapes))}"
        )


def _iterable(data):
    return isinstance(data, Iterable | keras.utils.PyDataset)


def _items(data):
    if isinstance(data, keras.utils.PyDataset):
        return (data[index] for index in range(data.num_batches))
    return iter(data)


def _is_arrays(data):
    """Whether it is `(x, y)`, or a batchless structure of arrays."""
    return isinstance(data, tuple | dict) or hasattr(data, "shape")


def _tuple(data):
    return data if isinstance(data, tuple) else (data,)


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
    if not isinstance(batch, tuple):
        batch = tuple(batch) if isinstance(batch, list) else (batch,)
    return tree.map_structure(_to_array, batch)


def _to_array(leaf):
    # Ragged and sparse tensors are no arrays, and go to `fit` as they are.
    return as_numpy(leaf) if hasattr(leaf, "__array__") else leaf


def _samples(batch):
    leaf = next(leaf for leaf in tree.flatten(batch) if leaf is not None)
    return int(leaf.shape[0])
