"""Which dtype each layer computes in: global policy, rules, plan, hardware."""

from keras_mixprec.policies.apply import apply_policy
from keras_mixprec.policies.default_rules import DEFAULT_RULES
from keras_mixprec.policies.hardware import Recommendation, recommend_policy
from keras_mixprec.policies.plan import PrecisionPlan
from keras_mixprec.policies.rules import PrecisionRule, PrecisionRules
from keras_mixprec.policies.scope import (
    global_policy,
    policy_scope,
    set_global_policy,
)
from keras_mixprec.policies.summary import precision_summary

__all__ = [
    "DEFAULT_RULES",
    "PrecisionPlan",
    "PrecisionRule",
    "PrecisionRules",
    "Recommendation",
    "apply_policy",
    "global_policy",
    "policy_scope",
    "precision_summary",
    "recommend_policy",
    "set_global_policy",
]
