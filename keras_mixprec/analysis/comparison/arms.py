"""What is compared: policies, plans, and what else is set with them."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import keras

from keras_mixprec._checks import check_number
from keras_mixprec.loss_scaling.dynamic import DynamicLossScale
from keras_mixprec.loss_scaling.presets import PRESETS
from keras_mixprec.loss_scaling.rules import FixedLossScale, LossScale
from keras_mixprec.policies.matmul_precision import NAMES
from keras_mixprec.policies.plan import PrecisionPlan
from keras_mixprec.policies.scope import resolve

REWRITE = "graph_rewrite_"
MATMUL = tuple(name for name in NAMES if name != "default")
CALLBACKS = ("monitor", "tuner")
SETTINGS = (*MATMUL, f"{REWRITE}bfloat16", f"{REWRITE}float16", *CALLBACKS)


@dataclasses.dataclass(frozen=True)
class ArmRequest:
    """One row of the comparison to be.

    Attributes:
        name: String, unique.
        policy: String, the name of a policy, or a `PrecisionPlan`.
        settings: Tuple of names in `SETTINGS`.
        loss_scale: What `LossScaleOptimizer` takes; `None` for what the model
            is compiled with.
        loss_scale_name: String, `""` without one.
    """

    name: str
    policy: str | PrecisionPlan
    settings: tuple[str, ...] = ()
    loss_scale: Any = None
    loss_scale_name: str = ""

    @property
    def global_policy(self) -> str:
        """The policy under which the model is built."""
        if isinstance(self.policy, PrecisionPlan):
            return self.policy.default
        return self.policy

    @property
    def computes_in_float16(self) -> bool:
        """Whether any layer is to, so that a loss scale matters."""
        if f"{REWRITE}float16" in self.settings:
            return True
        names = [self.global_policy]
        if isinstance(self.policy, PrecisionPlan):
            names += self.policy.values()
        return any(name in ("float16", "mixed_float16") for name in names)

    def to_dict(self) -> dict:
        """Returns what the record has of it."""
        policy: Any = self.policy
        if isinstance(policy, PrecisionPlan):
            policy = {"default": policy.default, "layers": dict(policy)}
        return {
            "name": self.name,
            "policy": policy,
            "settings": list(self.settings),
            "loss_scale": self.loss_scale_name or None,
        }


def parse_arms(policies: Any, loss_scales: Any = None) -> list[ArmRequest]:
    """Returns what to compare, or raises saying what is wrong.

    Args:
        policies: As for `compare_precisions`.
        loss_scales: As for `compare_precisions`.
    """
    arms = [_arm(name, entry) for name, entry in _named(policies)]
    scales = _named_scales(loss_scales)
    if scales and not any(arm.computes_in_float16 for arm in arms):
        raise ValueError(
            "`loss_scales` are for policies that compute in float16, and none "
            f"of `policies` does. Received: policies={[a.name for a in arms]}"
        )
    arms = [scaled for arm in arms for scaled in _with_scales(arm, scales)]
    names = [arm.name for arm in arms]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(
            "Each policy must be there once; name plans by a dict, "
            f"{{'tuned': plan}}. Received: {sorted(twice)[0]!r} twice"
        )
    return arms


def _named(policies):
    """Pairs of a name, `None` for one to be made, and an entry."""
    if isinstance(policies, PrecisionPlan | str | keras.DTypePolicy):
        policies = (policies,)
    if isinstance(policies, Mapping):
        named = list(policies.items())
    elif isinstance(policies, Iterable):
        named = [(None, entry) for entry in policies]
    else:
        raise TypeError(
            "`policies` must be a list of policies and plans, or a dict of "
            f"them by name. Received: policies={policies!r} of type "
            f"{type(policies).__name__}"
        )
    if not named:
        raise ValueError(
            f"`policies` must have at least one. Received: {policies!r}"
        )
    return named


def _arm(name, entry):
    parts = entry if isinstance(entry, tuple) else (entry,)
    if parts and isinstance(parts[0], str):
        parts = (*parts[0].split("+"), *parts[1:])
    if not parts:
        raise ValueError("An entry of `policies` must have a policy.")
    policy, settings = parts[0], parts[1:]
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
    return ArmRequest(name or "+".join([made, *settings]), policy, settings)


def _named_scales(loss_scales):
    """Dict from names to what `LossScaleOptimizer` takes."""
    if loss_scales is None:
        return {}
    if isinstance(loss_scales, str | int | float | LossScale):
        loss_scales = (loss_scales,)
    found = [_scale(entry) for entry in loss_scales]
    named: dict[str, Any] = {}
    for name, scale in found:
        count = sum(other.partition(" #")[0] == name for other in named)
        named[f"{name} #{count + 1}" if count else name] = scale
    return named


def _scale(entry):
    if isinstance(entry, str):
        if entry not in ("dynamic", *PRESETS):
            raise ValueError(
                "`loss_scales` must be numbers, rules, schedules, 'dynamic' "
                f"or presets, {', '.join(map(repr, PRESETS))}. "
                f"Received: {entry!r}"
            )
        preset = entry if entry == "dynamic" else DynamicLossScale.preset(entry)
        return entry, preset
    if isinstance(
        entry, LossScale | keras.optimizers.schedules.LearningRateSchedule
    ):
        return type(entry).__name__, entry
    number = check_number("loss_scales", entry)
    return f"{number:g}", FixedLossScale(number)


def _with_scales(arm, scales):
    if not scales or not arm.computes_in_float16:
        return [arm]
    return [
        dataclasses.replace(
            arm,
            name=f"{arm.name}, loss scale {name}",
            loss_scale=scale,
            loss_scale_name=name,
        )
        for name, scale in scales.items()
    ]
