"""The arms of a comparison: policies, plans, and settings beside them."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import keras

from keras_mixprec._checks import check_type
from keras_mixprec.policies.matmul_precision import NAMES
from keras_mixprec.policies.plan import PrecisionPlan
from keras_mixprec.policies.scope import resolve

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
    """One row of the comparison to be.

    Attributes:
        name: String, unique.
        policy: String, the name of a policy, or a `PrecisionPlan`.
        settings: Tuple of names in `SETTINGS`.
    """

    name: str
    policy: str | PrecisionPlan
    settings: tuple[str, ...] = ()

    def to_dict(self) -> dict:
        """Returns what the record has of it."""
        policy: Any = self.policy
        if isinstance(policy, PrecisionPlan):
            policy = {"default": policy.default, "layers": dict(policy)}
        settings = list(self.settings)
        return {"name": self.name, "policy": policy, "settings": settings}


def parse_arms(policies: Any) -> list[ArmRequest]:
    """Returns what to compare, or raises saying what is wrong.

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
            f"`policies` must have at least one. Received: {policies!r}"
        )
    names = [arm.name for arm in arms]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(
            "Each policy must be there once; name plans by a dict, "
            f"{{'tuned': plan}}. Received: {twice[0]!r} twice"
        )
    return arms


def _arm(name, entry):
    policy, *settings = entry if isinstance(entry, tuple) else (entry,)
    if isinstance(policy, str):
        policy, *more = policy.split("+")
        settings = [*more, *settings]
    if not isinstance(policy, PrecisionPlan):
        policy = resolve("policies", policy)
    for setting in settings:
        if setting not in SETTINGS:
            raise ValueError(
                "What is set with a policy must be one of "
                f"{', '.join(map(repr, SETTINGS))}. "
                f"Received: {setting!r} in {entry!r}"
            )
    made = "plan" if isinstance(policy, PrecisionPlan) else policy
    return ArmRequest(
        name or "+".join([made, *settings]), policy, tuple(settings)
    )
