"""The plan that a tuner starts from and writes, and whether it is whole."""

import filecmp
import itertools
import os
import shutil
from pathlib import Path
from typing import NamedTuple

from keras_mixprec.policies import plan_file
from keras_mixprec.policies.layers import MODEL_PATH
from keras_mixprec.policies.names import can_be_set, is_16_bit
from keras_mixprec.policies.plan import PrecisionPlan

# A layer is tried again after twice as long each time: no run lasts for more.
_MOST_TRIES = 1000

_TEXTS = ("before", "policy", "kind", "reason")


def check_state(state: dict) -> dict:
    """Returns what `Repairs.state` returned, read back from a file.

    Args:
        state: Dict, as JSON has it; empty if no tuner wrote the plan.

    Raises:
        ValueError: If it is damaged.
    """
    state = {"demotions": {}, "tries": {}, "rebuilds": 0} | state
    for name, valid in _VALID.items():
        if name in state and not valid(state[name]):
            _refuse(name, state[name])
    if missing := state["demotions"].keys() - state["tries"].keys():
        _refuse("tries", f"nothing for {sorted(missing)}")
    return state


def _refuse(name, value):
    raise ValueError(
        "What a tuner wrote beside the plan is damaged; delete `tuner` from "
        f"the file to go on without. Received: {name}={str(value)[:200]}"
    )


def _is_integer(value, low=0, high=float("inf")):
    return type(value) is int and low <= value <= high


def _are_texts(value):
    return isinstance(value, dict) and all(
        isinstance(text, str) for text in value.values()
    )


def _are_tries(value):
    return isinstance(value, dict) and all(
        _is_integer(count, 1, _MOST_TRIES) for count in value.values()
    )


def _are_demotions(value):
    return isinstance(value, dict) and all(map(_is_demotion, value.values()))


def _is_demotion(value):
    return (
        isinstance(value, dict)
        and value.keys() - {"because"} == {*_TEXTS, "step"}
        and isinstance(value.get("because", ""), str)
        and all(isinstance(value[name], str) for name in _TEXTS)
        and can_be_set(value["before"])
        and can_be_set(value["policy"])
        and _is_integer(value["step"])
    )


def _is_number(value):
    return type(value) in (int, float) or value in ("inf", "-inf", "nan", None)


def _is_sign_off(value):
    if value is None:
        return True
    return (
        isinstance(value, dict)
        and all(_is_number(value.get(name)) for name in _OF_SIGN_OFF)
        and isinstance(value.get("metric"), str)
        and type(value.get("within")) is bool
        and _is_integer(value.get("step"))
    )


_OF_SIGN_OFF = ("float32", "plan", "tolerance")

_VALID = {
    "demotions": _are_demotions,
    "tries": _are_tries,
    "asked": _are_texts,
    "rebuilds": _is_integer,
    "sign_off": _is_sign_off,
}


class PlanStart(NamedTuple):
    """What of a plan a model starts from.

    Attributes:
        used: Dict from path to policy.
        aside: Dict from path to how plan and model differ there, so that the
            plan is not followed.
        asked: Dict from path to the policy that the script had set when the
            plan was made, of those used.
        reasons: Dict from path to the reason that the plan has, of those used.
        state: Dict, what the tuner wrote that made the plan.
        keeps_file: Boolean. Whether the script computes nothing in 16 bits any
            more, so that the plan waits for one that does.
    """

    used: dict
    aside: dict
    asked: dict
    reasons: dict
    state: dict
    keeps_file: bool


def starting_from(
    plan: PrecisionPlan, state: dict, asked: dict, containers: set
) -> PlanStart:
    """Returns what of a plan fits a model.

    A plan repairs what a script asks for. Where the script asks for something
    else than when a tuner wrote the plan, the script wins. A model that was
    saved with its repairs has the plan's policies, and that is no difference.

    Args:
        plan: `PrecisionPlan`.
        state: Dict, what a tuner left with it; empty if somebody else wrote it.
        asked: Dict from path to the policy that the script has set, of all
            layers of the model.
        containers: Set of the paths of Functional and Sequential models, whose
            policies Keras' files do not hold.
    """
    entries = {MODEL_PATH: plan.default, **plan}
    checked = check_state(state)
    # An older tuner has left only what it demoted.
    built = {p: d["before"] for p, d in checked["demotions"].items()}
    made_for = state.get("asked", {**plan, **built}) if state else asked
    made_for = {p: made_for.get(p, policy) for p, policy in asked.items()}
    changed = {p for p in entries if p in asked and made_for[p] != asked[p]}
    differ = {p for p in changed if entries[p] != asked[p]}
    is_wide = not any(map(is_16_bit, asked.values()))
    if is_wide and differ:
        differ = changed
    elif differ <= containers:
        differ = set()
    used, aside = {}, {}
    for path, policy in entries.items():
        if path not in asked:
            aside[path] = "the model has no such layer"
        elif path in differ:
            aside[path] = f"{made_for[path]} then, {asked[path]} now"
        elif not can_be_set(policy) and policy != asked[path]:
            aside[path] = f"{policy} cannot be set"
        else:
            used[path] = policy
    aside |= {
        path: "the plan has no such layer"
        for path in asked
        if not any(above in entries for above in _lineage(path))
    }
    return PlanStart(
        used,
        aside,
        {p: made_for[p] for p in used},
        {p: why for p, why in plan.reasons.items() if p in used},
        checked,
        bool(aside) and is_wide,
    )


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
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(
                "`plan` must be the path of a JSON file. "
                f"Received: plan={path!r} of type {type(path).__name__}"
            )
        # Somebody may change the working folder before it is written.
        self.path = Path(path).absolute()

    def load(self) -> tuple[PrecisionPlan, dict] | None:
        """Returns the plan and the tuner's state, `None` if there is no file.

        Raises:
            ValueError: If the file is damaged.
        """
        if not self.path.exists():
            return None
        return PrecisionPlan.load(self.path), plan_file.read_tuner(self.path)

    @property
    def earlier(self) -> Path:
        """Where the file is kept that does not fit any more.

        No file that is kept already is overwritten by another one.
        """
        for number in itertools.count(1):
            old = ".old" if number == 1 else f".old{number}"
            kept = self.path.with_name(
                f"{self.path.stem}{old}{self.path.suffix}"
            )
            if not kept.exists() or filecmp.cmp(kept, self.path, shallow=False):
                break
        return kept

    def save(self, repairs, keep_earlier: bool = False):
        """Writes what the model follows now.

        Args:
            repairs: `Repairs` of the model.
            keep_earlier: Boolean. Whether to keep the old file as `earlier`.
                Defaults to `False`.

        Raises:
            OSError: If it cannot be written; the old file is left as it was.
        """
        try:
            if keep_earlier:
                shutil.copy(self.path, self.earlier)
            plan_file.write(self.path, repairs.plan(), repairs.state())
        except OSError as error:
            raise OSError(
                "The plan cannot be written; choose a path in a folder that "
                "exists and may be written to. "
                f"Received: plan={str(self.path)!r} ({error})"
            ) from error

    def save_if_possible(self, repairs) -> OSError | None:
        """Writes what the model follows now, in training.

        A folder that was removed meanwhile is made again.

        Args:
            repairs: `Repairs` of the model.

        Returns:
            What keeps it from being written, `None` if it is.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            plan_file.write(self.path, repairs.plan(), repairs.state())
        except OSError as error:
            return error
        return None
