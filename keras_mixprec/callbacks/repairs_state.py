"""What a tuner leaves in a plan for the next one: whether it is whole."""

from keras_mixprec.policies.names import POLICY_NAMES

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
        and {value["before"], value["policy"]} <= set(POLICY_NAMES)
        and _is_integer(value["step"])
    )


def _is_share(value):
    return type(value) in (int, float) and 0 <= value <= 1


_VALID = {
    "demotions": _are_demotions,
    "tries": _are_tries,
    "rebuilds": _is_integer,
    "share_at_first": _is_share,
}
