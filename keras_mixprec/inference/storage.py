"""Which dtype each layer stores its weights in, and computes in."""

from collections.abc import Iterable

import keras

from keras_mixprec.formats import SIXTEEN_BITS
from keras_mixprec.keras_internals import Functional
from keras_mixprec.policies.default_rules import DEFAULT_RULES
from keras_mixprec.policies.layers import MODEL_PATH, LayerEntry
from keras_mixprec.policies.names import is_16_bit, is_fixed
from keras_mixprec.policies.plan import PrecisionPlan
from keras_mixprec.policies.rules import (
    OUTPUT,
    Matcher,
    PrecisionRule,
    PrecisionRules,
)

# A variance below 6e-8 is 0 in float16, and one above 65504 infinite.
_KEPT_STATISTICS = (
    keras.layers.BatchNormalization,
    keras.layers.SpectralNormalization,
)
_STATISTICS_REASON = "moving statistics stay in float32, it computes in 16 bits"


class Assignment:
    """The policy that each layer of a converted model is to follow.

    Attributes:
        policies: Dict of layer path to policy name; the model's own as well.
        reasons: Dict of layer path to string, where there is one.
    """

    def __init__(self):
        self.policies: dict[str, str] = {}
        self.reasons: dict[str, str] = {}

    def set(self, path: str, policy: str, reason: str = "") -> None:
        """Gives a layer a policy, and why."""
        self.policies[path] = policy
        self.reasons.pop(path, None)
        if reason:
            self.reasons[path] = reason

    def widened(self, path: str, reason: str) -> "Assignment":
        """Returns another one, with a layer and all inside it in float32."""
        other = Assignment()
        for own, policy in self.policies.items():
            if own == path or own.startswith(f"{path}/") or path == MODEL_PATH:
                other.set(own, "float32", reason if own == path else "")
            else:
                other.set(own, policy, self.reasons.get(own, ""))
        return other

    def replaced(
        self, path: str, policy: str, reason: str = ""
    ) -> "Assignment":
        """Returns another one, with a layer of another policy."""
        other = Assignment()
        other.policies, other.reasons = dict(self.policies), dict(self.reasons)
        other.set(path, policy, reason)
        return other

    def dtypes(self) -> list[str]:
        """Returns the 16-bit dtypes in it."""
        found = [p.removeprefix("mixed_") for p in self.policies.values()]
        return [d for d in dict.fromkeys(found) if d in SIXTEEN_BITS]

    def is_narrow(self, path: str) -> bool:
        """Whether a layer, or one inside it, computes in 16 bits."""
        return self.widened(path, "").policies != self.policies

    def is_inside_float32(self, path: str) -> bool:
        """Whether a layer that this one is part of is in float32."""
        parts = path.split("/")
        holders = ["/".join(parts[:n]) for n in range(1, len(parts))]
        return any(self.policies.get(p) == "float32" for p in holders)

    def computing(self, entries: list[LayerEntry]) -> dict[str, list]:
        """Returns what to compute in whatever the weights are stored in.

        Args:
            entries: The `LayerEntry`s of a model.

        Returns:
            Dict of policy name to list of layers, for `temporary_policies`.
        """
        found: dict[str, list] = {}
        for entry in entries:
            policy = self.policies.get(entry.path, "float32")
            # Of a layer with float32 weights "float16" casts none.
            policy = f"mixed_{policy}" if policy in SIXTEEN_BITS else policy
            found.setdefault(policy, []).append(entry.layer)
        return found


def by_rules(
    model: keras.Model,
    entries: list[LayerEntry],
    dtype: str,
    rules: Iterable[PrecisionRule] | None,
) -> Assignment:
    """Returns 16 bits for all layers but those that a rule keeps wide.

    Args:
        model: The reference of a `Rebuilder`.
        entries: Its entries.
        dtype: String, `"float16"` or `"bfloat16"`.
        rules: Iterable of `PrecisionRule`. `None` takes the default ones but
            for that of the outputs, which are cast.
    """
    if rules is None:
        rules = [rule for rule in DEFAULT_RULES if rule.match != OUTPUT]
    else:
        rules = PrecisionRules(rules)
        rules.warn_unmatched(model)
    matcher = Matcher(rules, model)
    found = Assignment()
    for entry in _settable(entries):
        rule = matcher.first(entry)
        policy, reason = (rule.policy, rule.reason) if rule else (dtype, "")
        found.set(entry.path, *_stored(entry.layer, policy, reason))
    return found


def by_plan(
    entries: list[LayerEntry],
    origins: dict[str, LayerEntry],
    plan: PrecisionPlan,
) -> Assignment:
    """Returns what a plan says, its 16-bit layers with weights of 16 bits.

    Args:
        entries: Those of a `Rebuilder`.
        origins: Dict from their paths to the entries that the plan is of.
        plan: A `PrecisionPlan` that fits the model.
    """
    found = Assignment()
    for entry in _settable(entries):
        decided = plan.decide(origins[entry.path])
        found.set(entry.path, *_stored(entry.layer, *decided))
    return found


def has_policy(layer: keras.layers.Layer) -> bool:
    """Whether a policy of 16 bits or not changes what a layer does."""
    # A graph computes nothing itself, and no config has its policy.
    graphs = (Functional, keras.Sequential)
    return type(layer) not in graphs and not is_fixed(layer)


def _settable(entries):
    return [entry for entry in entries if has_policy(entry.layer)]


def _stored(layer, policy, reason):
    """The policy that stores weights in what it computes in, but statistics."""
    if not is_16_bit(policy):
        return policy, reason
    dtype = policy.removeprefix("mixed_")
    if isinstance(layer, _KEPT_STATISTICS):
        return f"mixed_{dtype}", reason or _STATISTICS_REASON
    return dtype, reason
