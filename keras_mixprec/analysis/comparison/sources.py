"""Reads the functions, data and policies that the caller passes."""

import dataclasses
import importlib
import itertools
import os
import pickle
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras
from keras import tree

from keras_mixprec._checks import check_type
from keras_mixprec._console import one_line
from keras_mixprec.numerics.arrays import as_numpy
from keras_mixprec.policies.apply import apply_policy
from keras_mixprec.policies.matmul_precision import NAMES
from keras_mixprec.policies.plan import PrecisionPlan
from keras_mixprec.policies.scope import resolve as check_policy_name


def resolve(name: str, value: Any) -> Any:
    """Returns the object at `"module:name"`, and any other value unchanged.

    Args:
        name: String. The argument's name, for messages.
        value: String or object.

    Raises:
        ValueError: If the object cannot be imported.
    """
    if not isinstance(value, str):
        return value
    if not all(value.partition(":")):
        raise ValueError(
            f"`{name}` as a string must be 'module:name'. "
            f"Received: {name}={value!r}"
        )
    return import_from(name, value)


def import_from(name: str, value: str) -> Any:
    """Returns the object at `"module:name"`, or the module at `"module"`.

    Args:
        name: String. The argument's name, for messages.
        value: String.

    Raises:
        ValueError: If the import fails.
    """
    module, _, path = value.partition(":")
    try:
        found = importlib.import_module(module)
        for part in filter(None, path.split(".")):
            found = getattr(found, part)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        # Name the file of the error only if the file exists. Python's
        # frozen modules, such as `importlib`, have no files.
        own = os.path.exists(last.filename) and last.filename != __file__
        where = f" ({last.filename}, line {last.lineno})" if own else ""
        raise ValueError(
            f"`{name}` cannot be imported: {one_line(error)}{where}. "
            f"Received: {name}={value!r}"
        ) from error
    return found


def check_function(name: str, value: Any, optional: bool = False) -> None:
    """Raises if a value is neither a function nor `"module:name"` of one.

    Args:
        name: String. The argument's name, for messages.
        value: Object.
        optional: Boolean. If `True`, the value may be `None`.
    """
    found = resolve(name, value)
    # Models are callable, but a model is not a function that builds one.
    made = isinstance(found, keras.Model)
    if (made or not callable(found)) and not (optional and value is None):
        raise TypeError(
            f"`{name}` must be a function without arguments, or 'module:name' "
            f"of one. Received: {name}={value!r} of type {type(value).__name__}"
        )


def build_model(build: Any, policy: str | PrecisionPlan) -> tuple:
    """Returns the compiled model that a function builds under a policy.

    The policy becomes Keras' global policy. For a plan, or if the function sets
    a different policy, `apply_policy` sets the model's policies afterwards.

    Args:
        build: Function without arguments, or `"module:name"` of one.
        policy: String, or a `PrecisionPlan`.

    Returns:
        The model, and the global policy after `build`.

    Raises:
        TypeError: If the function does not return a model.
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
            "`build` must return a compiled model. "
            f"Received: model={model.name!r}"
        )
    left = keras.config.dtype_policy().name
    if plan or left != name:
        apply_policy(model, plan or name)
    return model, left


def check_sendable(name: str, value: Any, what: str) -> None:
    """Raises if a value cannot be sent to a new process.

    Args:
        name: String. The argument's name, for messages.
        value: Object.
        what: String. The beginning of the message, such as `"Trials run"`.
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
        arrays: Tuple of the arrays from which the batches were cut. Defaults to
            `None`: the data were not arrays.

    Attributes:
        batches: The list of batches.
    """

    def __init__(self, batches: list, arrays: tuple | None = None):
        self.batches = batches
        self._arrays = arrays

    def fit_arguments(self, steps: int) -> dict[str, Any]:
        """Returns arguments for a `fit` with `steps` batches per epoch.

        If an epoch is one pass over arrays, `fit` gets the arrays, so that the
        losses equal those of the caller's own `fit`. On torch, the losses
        depend on the kind of data, because reading data draws from the random
        generator that dropout uses.
        """
        if self._arrays is not None and steps == len(self.batches):
            names = "x", "y", "sample_weight"
            given = dict(zip(names, self._arrays, strict=False))
            return {**given, "batch_size": samples(self.batches[0])}
        return {"x": self._repeated(), "steps_per_epoch": steps}

    def samples_per_step(self, steps: int) -> float:
        """Returns the mean number of samples in the first `steps` batches."""
        counts = map(samples, itertools.islice(self._repeated(), steps))
        return sum(counts) / steps

    def _repeated(self):
        # `fit` accepts generators, but no other iterators.
        while True:
            yield from self.batches


def samples(batch: tuple) -> int:
    """Returns the number of samples in a batch."""
    leaf = next(leaf for leaf in tree.flatten(batch) if leaf is not None)
    return int(leaf.shape[0])


def read_batches(
    name: str, data: Any, batch_size: int, most: int | None = None
) -> Batches:
    """Reads the caller's data.

    Args:
        name: String. The argument's name, for messages.
        data: Arrays, an iterable of batches, a function that returns either,
            or `"module:name"` of one of these.
        batch_size: Int. Samples per batch of arrays.
        most: Int. The maximum number of batches to read. Defaults to `None`:
            all.

    Raises:
        TypeError: If `data` has the wrong type.
        ValueError: If there is no sample, or the arrays differ in length.
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
            f"`{name}` must be arrays `(x, y)`, an iterable of batches, or a "
            f"function that returns either. Received: {name}={str(data)[:80]} "
            f"of type {type(data).__name__}"
        )
    found = list(itertools.islice(batches, most))
    if not found or not samples(found[0]):
        raise ValueError(
            f"`{name}` must have at least one sample. "
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
            f"`{name}` must be `(x, y)` or `(x, y, sample_weight)`, with the "
            "same number of samples in each. "
            f"Received: {len(data)} part(s) with sample counts {sorted(counts)}"
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
    # Ragged and sparse tensors are not arrays, so `fit` gets them unchanged.
    return as_numpy(leaf) if hasattr(leaf, "__array__") else leaf


REWRITE = "graph_rewrite_"
MATMUL = tuple(name for name in NAMES if name != "default")
SETTINGS = (
    *MATMUL,
    f"{REWRITE}bfloat16",
    f"{REWRITE}float16",
    "monitor",
    "tuner",
)


@dataclasses.dataclass(frozen=True)
class ArmRequest:
    """A policy to compare, with its settings.

    Attributes:
        name: String, unique.
        policy: String, the name of a policy, or a `PrecisionPlan`.
        settings: Tuple of names in `SETTINGS`.
    """

    name: str
    policy: str | PrecisionPlan
    settings: tuple[str, ...] = ()

    def to_dict(self) -> dict:
        """Returns the record's entry for the arm."""
        policy: Any = self.policy
        if isinstance(policy, PrecisionPlan):
            policy = {"default": policy.default, "layers": dict(policy)}
        settings = list(self.settings)
        return {"name": self.name, "policy": policy, "settings": settings}


def parse_arms(policies: Any) -> list[ArmRequest]:
    """Returns the arms to compare, or raises if `policies` is wrong.

    Args:
        policies: As for `compare_precisions`.
    """
    if isinstance(policies, PrecisionPlan | str | keras.DTypePolicy):
        policies = (policies,)
    what = "a list of policies and plans, or a dict of them by name"
    check_type("policies", policies, Iterable, what)
    named = isinstance(policies, Mapping)
    entries = policies.items() if named else [("", x) for x in policies]
    arms = [_arm(name, entry) for name, entry in entries]
    if not arms:
        raise ValueError(
            f"`policies` must not be empty. Received: {policies!r}"
        )
    names = [arm.name for arm in arms]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(
            "Name each policy once. Use a dict to name plans: "
            f"{{'tuned': plan}}. Received: {twice[0]!r} twice"
        )
    return arms


def _arm(name, entry):
    policy, *settings = entry if isinstance(entry, tuple) else (entry,)
    if isinstance(policy, str):
        policy, *more = policy.split("+")
        settings = [*more, *settings]
    if not isinstance(policy, PrecisionPlan):
        policy = check_policy_name("policies", policy)
    for setting in settings:
        if setting not in SETTINGS:
            raise ValueError(
                "A setting of a policy must be one of "
                f"{', '.join(map(repr, SETTINGS))}. "
                f"Received: {setting!r} in {entry!r}"
            )
    made = "plan" if isinstance(policy, PrecisionPlan) else policy
    return ArmRequest(
        name or "+".join([made, *settings]), policy, tuple(settings)
    )
