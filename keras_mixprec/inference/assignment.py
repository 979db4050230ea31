"""Chooses the dtypes in which each layer stores its weights and computes."""

from collections.abc import Iterable
from typing import NamedTuple

import keras

from keras_mixprec.formats import SIXTEEN_BITS
from keras_mixprec.keras_internals import Functional
from keras_mixprec.policies.default_rules import DEFAULT_RULES
from keras_mixprec.policies.layers import LayerEntry
from keras_mixprec.policies.names import is_16_bit, is_fixed
from keras_mixprec.policies.plan import PrecisionPlan
from keras_mixprec.policies.rules import (
    OUTPUT,
    Matcher,
    PrecisionRule,
    PrecisionRules,
)

# Layers whose moving statistics stay in float32. In float16, a variance below
# 3e-8 becomes 0, and a variance above 65504 overflows.
_KEPT_STATISTICS = (
    keras.layers.BatchNormalization,
    keras.layers.SpectralNormalization,
)
_STATISTICS_REASON = "its moving statistics stay in float32"


class Assignment(NamedTuple):
    """The policies of the layers of a converted model.

    Attributes:
        policies: Dict of layer path to policy name, including the model's own.
        reasons: Dict of layer path to string, for layers with a reason.
    """

    policies: dict[str, str]
    reasons: dict[str, str]

    def replaced(
        self, paths: Iterable[str], policy: str, reason: str
    ) -> "Assignment":
        """Returns a copy in which some layers follow a different policy."""
        own = dict.fromkeys(paths)
        return Assignment(
            self.policies | dict.fromkeys(own, policy),
            self.reasons | dict.fromkeys(own, reason),
        )

    def widened(self, path: str, reason: str) -> "Assignment":
        """Returns a copy with a layer and its sublayers in float32."""
        inside = [p for p in self.policies if p.startswith(f"{path}/")]
        return self.replaced(inside, "float32", "").replaced(
            [path], "float32", reason
        )

    def dtypes(self) -> list[str]:
        """Returns the 16-bit dtypes that the policies use."""
        found = [p.removeprefix("mixed_") for p in self.policies.values()]
        return [d for d in dict.fromkeys(found) if d in SIXTEEN_BITS]

    def is_inside_float32(self, path: str) -> bool:
        """Returns whether a layer that contains this one is in float32."""
        while path := path.rpartition("/")[0]:
            if self.policies.get(path) == "float32":
                return True
        return False

    def computing(self, entries: list[LayerEntry]) -> dict[str, list]:
        """Returns policies that try the assignment on the float32 model.

        The weights stay float32, so 16-bit dtypes become mixed policies.

        Args:
            entries: The `LayerEntry`s of the model.

        Returns:
            Dict of policy name to list of layers, for `temporary_policies`.
        """
        found: dict[str, list] = {}
        for entry in entries:
            policy = self.policies.get(entry.path, "float32")
            # The policy "float16" would not cast float32 weights to float16,
            # but "mixed_float16" does.
            policy = f"mixed_{policy}" if policy in SIXTEEN_BITS else policy
            found.setdefault(policy, []).append(entry.layer)
        return found


def by_rules(
    model: keras.Model,
    entries: list[LayerEntry],
    dtype: str,
    rules: Iterable[PrecisionRule] | None,
) -> Assignment:
    """Assigns the policies of rules, and 16 bits to all other layers.

    Args:
        model: The reference of a `Rebuilder`.
        entries: Its entries.
        dtype: String, `"float16"` or `"bfloat16"`.
        rules: Iterable of `PrecisionRule`. `None` means the default rules
            without the rule for outputs, because the converted model casts its
            outputs to float32.
    """
    if rules is None:
        rules = [rule for rule in DEFAULT_RULES if rule.match != OUTPUT]
    else:
        rules = PrecisionRules(rules)
        rules.warn_unmatched(model)
    matcher = Matcher(rules, model)

    def decide(entry):
        rule = matcher.first(entry)
        return (rule.policy, rule.reason) if rule else (dtype, "")

    return _decided(entries, decide)


def by_plan(
    entries: list[LayerEntry],
    origins: dict[str, LayerEntry],
    plan: PrecisionPlan,
) -> Assignment:
    """Assigns the policies of a plan, with 16-bit weights for 16-bit layers.

    Args:
        entries: The entries of a `Rebuilder`.
        origins: Dict from their paths to the entries of the plan's model.
        plan: A `PrecisionPlan` that fits the model.
    """
    return _decided(entries, lambda entry: plan.decide(origins[entry.path]))


def has_policy(layer: keras.layers.Layer) -> bool:
    """Returns whether a policy affects a layer."""
    # `Functional` and `Sequential` models compute nothing themselves, and their
    # configs have no policy.
    graphs = (Functional, keras.Sequential)
    return type(layer) not in graphs and not is_fixed(layer)


def _decided(entries, decide):
    found = Assignment({}, {})
    for entry in entries:
        if has_policy(entry.layer):
            policy, reason = _stored(entry.layer, *decide(entry))
            found = found.replaced([entry.path], policy, reason)
    return found


def _stored(layer, policy, reason):
    """Returns the policy with 16-bit weights, but with float32 statistics."""
    if not is_16_bit(policy):
        return policy, reason
    dtype = policy.removeprefix("mixed_")
    if isinstance(layer, _KEPT_STATISTICS):
        return f"mixed_{dtype}", reason or _STATISTICS_REASON
    return dtype, reason
