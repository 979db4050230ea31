"""The plan that a tuner starts from and writes, and whether it is whole."""

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

# The wait doubles with each try, so no run makes more tries.
_MOST_TRIES = 1000


class Demotion(NamedTuple):
    """A layer that computes in a wider dtype than it was built with.

    Attributes:
        before: String. Its policy as it was built.
        policy: String. Its policy now.
        step: Int. When that changed.
        kind: String. The kind of the verdict, `"casts"`, `"give_up"` or
            `"validation"`.
        reason: String. The verdict, or another reason.
        because: String. The reason without numbers, for the row of the layer.
            Empty if `reason` is short.
    """

    before: str
    policy: str
    step: int
    kind: str
    reason: str
    because: str = ""


def check_state(state: dict) -> dict:
    """Returns what `Repairs.state` returned, read back from a file.

    Args:
        state: Dict, as JSON has it; empty if no tuner wrote the plan.

    Raises:
        ValueError: If it is damaged.
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
        "The tuner's part of the plan file is damaged; delete `tuner` from "
        f"the file to go on without it. Received: {name}={str(value)[:200]}"
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
    """Returns where a model differs from the one that a plan was made for.

    A plan repairs what a script asks for. If the script asks for another policy
    than when a tuner wrote the plan, the script wins. A model that was saved
    with its repairs has the plan's policies, and that is not a difference.

    Args:
        plan: Dict from path to policy, the model itself included.
        made_for: Dict from path to the policy that the script had set when the
            plan was written, for the layers of the model.
        asked: Dict from path to the policy that the script has set now.
        containers: Set of the paths of Functional and Sequential models, whose
            policies Keras' files do not hold.

    Returns:
        Dict from path to how plan and model differ there.
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
    """Returns whether any of the policies, by path, is one of 16 bits."""
    return any(map(is_16_bit, policies.values()))


def _lineage(path):
    while path:
        yield path
        path = path.rpartition("/")[0]


class PlanOnDisk:
    """The file of a plan.

    Args:
        path: String or path-like.
    """

    def __init__(self, path):
        check_type("plan", path, (str, os.PathLike), "the path of a JSON file")
        # The working folder may change before the file is written.
        self.path = Path(path).absolute()

    def load(self, model) -> tuple[PrecisionPlan, dict] | None:
        """Returns the plan and the tuner's state, `None` if there is no file.

        All workers get the plan of the first one, which alone writes the file.

        Args:
            model: The `keras.Model` that they train together.

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
        """The path for a copy of the file that overwrites no other copy."""
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
        """Writes the plan that the model follows, before training.

        Args:
            repairs: `Repairs` of the model.
            keep_earlier: Boolean, whether to keep the old file as `earlier`.
                Defaults to `False`.

        Raises:
            OSError: If it cannot be written. The old file stays as it was.
        """
        try:
            if keep_earlier:
                shutil.copy(self.path, self.earlier)
            self.update(repairs)
        except OSError as error:
            raise OSError(
                "The plan cannot be written; choose a path in a folder that "
                "exists and may be written to. "
                f"Received: plan={str(self.path)!r} ({error})"
            ) from error

    def update(self, repairs):
        """Writes the plan that the model follows, in training.

        Args:
            repairs: `Repairs` of the model.

        Raises:
            OSError: As `save`.
        """
        plan_file.write(self.path, repairs.plan(), repairs.state())
