"""Reads, validates and writes the plan of a tuner."""

import filecmp
import itertools
import os
import shutil
from pathlib import Path
from typing import NamedTuple

from keras_mixprec._checks import check_type
from keras_mixprec.backend import active
from keras_mixprec.backend.common import of_all_workers
from keras_mixprec.policies import plan_file
from keras_mixprec.policies.names import can_be_set, is_16_bit
from keras_mixprec.policies.plan import PrecisionPlan

# The maximum number of tries of one layer in a plan file. The wait doubles with
# each try, so a larger number means that the file is damaged.
_MOST_TRIES = 1000


class Demotion(NamedTuple):
    """The demotion of a layer to a wider dtype.

    Attributes:
        before: String. The layer's original policy.
        policy: String. The layer's policy now.
        step: Int. The step of the demotion.
        kind: String. The kind of the verdict, `"casts"`, `"give_up"` or
            `"validation"`.
        reason: String. The finding of the verdict, or a different reason.
        because: String. The reason without numbers, for the layer table. Empty
            if `reason` is short.
    """

    before: str
    policy: str
    step: int
    kind: str
    reason: str
    because: str = ""


def check_state(state: dict) -> dict:
    """Validates the state of a `Repairs` from a file.

    Args:
        state: Dict from JSON, empty if no tuner wrote the plan.

    Returns:
        The state, with `Demotion`s.

    Raises:
        ValueError: If the state is damaged.
    """
    state = {"demotions": {}, "tries": {}, "rebuilds": 0} | state
    for name, is_valid in _VALID.items():
        if name in state and not is_valid(state[name]):
            _refuse(name, state[name])
    if missing := state["demotions"].keys() - state["tries"].keys():
        _refuse("tries", f"nothing for {sorted(missing)}")
    demotions = state["demotions"].items()
    return state | {"demotions": {p: Demotion(**d) for p, d in demotions}}


def _refuse(name, value):
    raise ValueError(
        "The tuner's part of the plan file is damaged. To continue without "
        "this part, delete `tuner` from the file. "
        f"Received: {name}={str(value)[:200]}"
    )


def _is_integer(value, low=0, high=float("inf")):
    return type(value) is int and low <= value <= high


def _is_demotion(value):
    try:
        found = Demotion(**value)
    except TypeError:
        return False
    kinds = Demotion.__annotations__.values()
    return (
        all(type(x) is kind for x, kind in zip(found, kinds, strict=True))
        and can_be_set(found.before)
        and can_be_set(found.policy)
        and found.step >= 0
    )


def _each(is_valid):
    """Returns a check for every value of a JSON object."""
    return lambda value: (
        isinstance(value, dict) and all(map(is_valid, value.values()))
    )


_VALID = {
    "demotions": _each(_is_demotion),
    "tries": _each(lambda count: _is_integer(count, 1, _MOST_TRIES)),
    "asked": _each(lambda policy: isinstance(policy, str)),
    "rebuilds": _is_integer,
}


def left_aside(
    plan: dict, made_for: dict, asked: dict, containers: set
) -> dict:
    """Returns the entries of a plan that do not fit a model.

    The user's code wins over the plan: if the code has set a new policy since
    the plan was written, the plan's entry is not used. A model that was saved
    with its repairs already has the plan's policies, so it does not differ.

    Args:
        plan: Dict from path to policy, including the model itself.
        made_for: Dict from path to the policy that the user's code had set when
            the plan was written, for the layers of the model.
        asked: Dict from path to the policy that the user's code has set now.
        containers: Set of the paths of Functional and Sequential models, whose
            policies are not saved in Keras' files.

    Returns:
        Dict from path to the difference between plan and model.
    """
    changed = {p for p in plan if p in asked and made_for[p] != asked[p]}
    differ = {p for p in changed if plan[p] != asked[p]}
    if differ and not computes_in_16_bits(asked):
        differ = changed
    elif differ <= containers:
        differ = set()
    aside = {}
    for path, policy in plan.items():
        if path not in asked:
            aside[path] = "the model has no such layer"
        elif path in differ:
            aside[path] = f"{made_for[path]} then, {asked[path]} now"
        elif not can_be_set(policy) and policy != asked[path]:
            aside[path] = f"{policy} cannot be set"
    return aside | {
        path: "the plan has no such layer"
        for path in asked
        if not any(above in plan for above in _lineage(path))
    }


def computes_in_16_bits(policies: dict) -> bool:
    """Returns whether any of the policies computes in 16 bits."""
    return any(map(is_16_bit, policies.values()))


def _lineage(path):
    while path:
        yield path
        path = path.rpartition("/")[0]


class PlanOnDisk:
    """The JSON file of a plan.

    Args:
        path: String or path-like.
    """

    def __init__(self, path):
        check_type("plan", path, (str, os.PathLike), "the path of a JSON file")
        # Make the path of the plan absolute, because the working directory may
        # change.
        self.path = Path(path).absolute()

    def load(self, model) -> tuple[PrecisionPlan, dict] | None:
        """Returns the plan and the tuner's state, or `None` without a file.

        All workers get the plan of the first worker, which writes the file.

        Args:
            model: The `keras.Model`.

        Raises:
            ValueError: If the file is damaged.
        """
        own = None
        if active.processes().rank(model) == 0 and self.path.exists():
            own = plan_file.read(self.path)
        found = [x for x in of_all_workers(model, own) if x is not None]
        if not found:
            return None
        arguments, state = found[0]
        return PrecisionPlan(**arguments), state

    @property
    def earlier(self) -> Path:
        """The path for a backup of the file that overwrites no other backup."""
        for number in itertools.count(1):
            old = ".old" if number == 1 else f".old{number}"
            kept = self.path.with_name(
                f"{self.path.stem}{old}{self.path.suffix}"
            )
            both_there = kept.exists() and self.path.exists()
            if not both_there or filecmp.cmp(kept, self.path, shallow=False):
                break
        return kept

    def save(self, repairs, keep_earlier: bool = False):
        """Writes the current plan before training.

        Args:
            repairs: `Repairs` of the model.
            keep_earlier: Boolean, whether to keep the old file as `earlier`.
                Defaults to `False`.

        Raises:
            OSError: If the file cannot be written. The old file stays as it is.
        """
        try:
            if keep_earlier:
                shutil.copy(self.path, self.earlier)
            self.update(repairs)
        except OSError as error:
            raise OSError(
                "The plan cannot be written. Choose a path in a writable "
                "folder. "
                f"Received: plan={str(self.path)!r} ({error})"
            ) from error

    def update(self, repairs):
        """Writes the current plan during training.

        Args:
            repairs: `Repairs` of the model.

        Raises:
            OSError: As for `save`.
        """
        plan_file.write(self.path, repairs.plan(), repairs.state())
