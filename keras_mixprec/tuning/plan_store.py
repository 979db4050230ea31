"""The plan that a tuner starts from and writes, and whether it is whole."""

import os
from pathlib import Path

from keras_mixprec.policies import plan_file
from keras_mixprec.policies.names import can_be_set
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


def _are_tries(value):
    return isinstance(value, dict) and all(
        _is_integer(count, 1, _MOST_TRIES) for count in value.values()
    )


def _are_demotions(value):
    return isinstance(value, dict) and all(map(_is_demotion, value.values()))


def _is_demotion(value):
    return (
        isinstance(value, dict)
        and value.keys() == {*_TEXTS, "step"}
        and all(isinstance(value[name], str) for name in _TEXTS)
        and can_be_set(value["before"])
        and can_be_set(value["policy"])
        and _is_integer(value["step"])
    )


def _is_share(value):
    return type(value) in (int, float) and 0 <= value <= 1


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
    "rebuilds": _is_integer,
    "share_at_first": _is_share,
    "sign_off": _is_sign_off,
}


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
        self.path = Path(path)

    def load(self, model) -> tuple[PrecisionPlan, dict] | None:
        """Returns the plan and the tuner's state, `None` if there is no file.

        Raises:
            ValueError: If the file is damaged or belongs to another model.
        """
        if not self.path.exists():
            return None
        plan = PrecisionPlan.load(self.path)
        plan.validate(model)
        return plan, plan_file.read_tuner(self.path)

    def save(self, repairs):
        """Writes what the model follows now.

        Args:
            repairs: `Repairs` of the model.

        Raises:
            OSError: If it cannot be written; the old file is left as it was.
        """
        try:
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
