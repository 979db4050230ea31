"""Which dtype each layer stores its weights in, and computes in."""

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

# A variance below 6e-8 is 0 in float16, and one above 65504 infinite.
_KEPT_STATISTICS = (
    keras.layers.BatchNormalization,
    keras.layers.SpectralNormalization,
)
_STATISTICS_REASON = "moving statistics stay in float32, it computes in 16 bits"


class Assignment(NamedTuple):
    """The policy that each layer of a converted model is to follow.

    Attributes:
        policies: Dict of layer path to policy name; the model's own as well.
        reasons: Dict of layer path to string, where there is one.
    """

    policies: dict[str, str]
    reasons: dict[str, str]

    def replaced(
        self, paths: Iterable[str], policy: str, reason: str
    ) -> "Assignment":
        """Returns another one, with layers of another policy."""
        own = dict.fromkeys(paths)
        return Assignment(
            self.policies | dict.fromkeys(own, policy),
            self.reasons | dict.fromkeys(own, reason),
        )

    def widened(self, path: str, reason: str) -> "Assignment":
        """Returns another one, with a layer and all inside it in float32."""
        inside = [p for p in self.policies if p.startswith(f"{path}/")]
        return self.replaced(inside, "float32", "").replaced(
            [path], "float32", reason
        )

    def dtypes(self) -> list[str]:
        """Returns the 16-bit dtypes in it."""
        found = [p.removeprefix("mixed_") for p in self.policies.values()]
        return [d for d in dict.fromkeys(found) if d in SIXTEEN_BITS]

    def is_inside_float32(self, path: str) -> bool:
        """Returns `True` if a layer that contains this one is in float32."""
        while path := path.rpartition("/")[0]:
            if self.policies.get(path) == "float32":
                return True
        return False

    def computing(self, entries: list[LayerEntry]) -> dict[str, list]:
        """Returns the policies to compute in while weights keep their dtype.

        Args:
            entries: The `LayerEntry`s of a model.

        Returns:
            Dict of policy name to list of layers, for `temporary_policies`.
        """
        found: dict[str, list] = {}
        for entry in entries:
            policy = self.policies.get(entry.path, "float32")
            # The policy "float16" does not cast weights that are float32.
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
        rules: Iterable of `PrecisionRule`. `None` takes the default ones
            without the rule for outputs, which are cast.
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
    """Returns what a plan says, its 16-bit layers with weights of 16 bits.

    Args:
        entries: Those of a `Rebuilder`.
        origins: Dict from their paths to the entries that the plan is of.
        plan: A `PrecisionPlan` that fits the model.
    """
    return _decided(entries, lambda entry: plan.decide(origins[entry.path]))


def has_policy(layer: keras.layers.Layer) -> bool:
    """Returns `True` if the policy changes what a layer does."""
    # A graph computes nothing itself, and no config has its policy.
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
    """The policy that stores weights in what it computes in, but statistics."""
    if not is_16_bit(policy):
        return policy, reason
    dtype = policy.removeprefix("mixed_")
    if isinstance(layer, _KEPT_STATISTICS):
        return f"mixed_{dtype}", reason or _STATISTICS_REASON
    return dtype, reason
