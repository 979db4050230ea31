"""Functions that a caller names or hands over, and the model one builds."""

import importlib
import itertools
import pickle
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import keras
from keras import tree

from keras_mixprec._console import one_line
from keras_mixprec.numerics.arrays import as_numpy
from keras_mixprec.policies.apply import apply_policy
from keras_mixprec.policies.plan import PrecisionPlan


def resolve(name: str, value: Any) -> Any:
    """Returns what `"module:name"` is, anything but a string as it is.

    Args:
        name: String. The argument's name as the caller typed it.
        value: String or object.

    Raises:
        ValueError: If there is no such module, or no such name in it.
    """
    if not isinstance(value, str):
        return value
    module, _, path = value.partition(":")
    if not module or not path:
        raise ValueError(
            f"`{name}` as a string must be 'module:name'. "
            f"Received: {name}={value!r}"
        )
    try:
        found = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"`{name}` cannot be imported: {error}. Received: {name}={value!r}"
        ) from error
    return found


def check_function(name: str, value: Any, optional: bool = False) -> None:
    """Raises if a value is no function, nor where one is imported from.

    Args:
        name: String. The argument's name as the caller typed it.
        value: Object.
        optional: Boolean. If `True`, it may be `None`.
    """
    found = resolve(name, value)
    made = isinstance(found, keras.Model)  # Which is callable too.
    if (made or not callable(found)) and not (optional and value is None):
        raise TypeError(
            f"`{name}` must be a function without arguments, or 'module:name' "
            f"of one. Received: {name}={value!r} of type {type(value).__name__}"
        )


def build_model(build: Any, policy: str | PrecisionPlan) -> tuple:
    """Returns the compiled model that a function makes under a policy.

    The policy is Keras' global one meanwhile and afterwards. If the function
    sets another policy, or for a plan, `apply_policy` sets the model's policies
    afterwards.

    Args:
        build: Function without arguments, or `"module:name"` of one.
        policy: String, or a `PrecisionPlan`.

    Returns:
        The model, and the global policy that `build` has left.

    Raises:
        TypeError: If it makes something else.
        ValueError: If the model is not compiled.
    """
    plan = policy if isinstance(policy, PrecisionPlan) else None
    name = plan.default if plan else policy
    keras.config.set_dtype_policy(name)
    model = resolve("build", build)()
    if not isinstance(model, keras.Model):
        raise TypeError(
            "`build` must return a compiled `keras.Model`. "
            f"Received: {model!r} of type {type(model).__name__}"
        )
    if not model.compiled:
        raise ValueError(
            "`build` must return a compiled model: call `model.compile(...)` "
            f"in it. Received: model={model.name!r}"
        )
    left = keras.config.dtype_policy().name
    if plan or left != name:
        apply_policy(model, plan or name)
    return model, left


def check_sendable(name: str, value: Any, what: str) -> None:
    """Raises if a process of its own cannot be given a value.

    Args:
        name: String. The argument's name as the caller typed it.
        value: Object.
        what: String. The beginning of the sentence: what runs in that process.

    Raises:
        ValueError: If that is so. The message says what to do.
    """
    main = sys.modules.get("__main__")
    why = ""
    try:
        pickle.dumps(value)
    except Exception as error:
        why = one_line(error)
    interactive = not hasattr(main, "__file__")
    if interactive and getattr(value, "__module__", "") == "__main__":
        why = "it is defined in a notebook or an interactive session"
    if why:
        raise ValueError(
            f"{what} in a new process, which imports `{name}`: pass a function "
            "at the top of a module, or 'module:name'. "
            f"Received: {name}={value!r} ({why})"
        )


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

        One pass over arrays is given as arrays, as a caller would do it. On
        torch each kind of data draws from the generator that dropout uses, so
        the kind changes the losses.
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
        TypeError: If it has another type.
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
    """Returns a batch as a tuple of arrays, as Keras' adapters do."""
    batch = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    return tree.map_structure(_to_array, batch)


def _to_array(leaf):
    # Ragged and sparse tensors are no arrays, and go to `fit` as they are.
    return as_numpy(leaf) if hasattr(leaf, "__array__") else leaf
