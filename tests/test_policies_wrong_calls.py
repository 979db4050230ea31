"""Wrong calls, each with its clear error at the call itself."""

import keras
import pytest
from keras import layers

from keras_mixprec import (
    PrecisionPlan,
    PrecisionRule,
    PrecisionRules,
    apply_policy,
    policy_scope,
    precision_summary,
    set_global_policy,
)


def model():
    return keras.Sequential([keras.Input((2,)), layers.Dense(2)])


PLAN = PrecisionPlan({"dense": "float32"})
OTHER = PrecisionPlan({"dens": "float32"})

WRONG = {
    "apply to no model": (
        lambda: apply_policy("model", "float32"),
        (TypeError, "must be a `keras.Model`.*of type str"),
    ),
    "apply to a layer": (
        lambda: apply_policy(layers.Dense(1), "float32"),
        (TypeError, "must be a `keras.Model`.*of type Dense"),
    ),
    "apply an unknown policy": (
        lambda: apply_policy(model(), "mixed_float15"),
        (ValueError, "one of 'float32', 'mixed_float16'.*mixed_float15"),
    ),
    "apply a path": (
        lambda: apply_policy(model(), "plan.json"),
        (ValueError, "`PrecisionPlan.load.path.`.*'plan.json'"),
    ),
    "apply a quantized policy": (
        lambda: apply_policy(model(), "int8_from_float32"),
        (ValueError, "must be one of"),
    ),
    "apply a map": (
        lambda: apply_policy(model(), keras.dtype_policies.DTypePolicyMap()),
        (ValueError, "must be one of.*map_float32"),
    ),
    "apply a number": (
        lambda: apply_policy(model(), 16),
        (TypeError, "name of a dtype policy.*of type int"),
    ),
    "apply nothing": (
        lambda: apply_policy(model(), None),
        (TypeError, "policy_or_plan=None"),
    ),
    "apply a dict": (
        lambda: apply_policy(model(), {"dense": "float32"}),
        (TypeError, "of type dict"),
    ),
    "apply a plan with rules": (
        lambda: apply_policy(model(), PLAN, rules=[]),
        (ValueError, "leave out `rules`"),
    ),
    "apply the plan of another model": (
        lambda: apply_policy(model(), OTHER),
        (ValueError, "unknown path 'dens': the nearest is 'dense'"),
    ),
    "rules that are a string": (
        lambda: apply_policy(model(), "mixed_float16", rules="dense"),
        (TypeError, "list of `PrecisionRule`.*'dense'"),
    ),
    "rules of strings": (
        lambda: apply_policy(model(), "mixed_float16", rules=["dense"]),
        (TypeError, "nothing but `PrecisionRule`s.*'dense'"),
    ),
    "rules that are a number": (
        lambda: PrecisionRules(3),
        (TypeError, "list of `PrecisionRule`.*of type int"),
    ),
    "a rule for a number": (
        lambda: PrecisionRule(3),
        (TypeError, "layer class, a path pattern or a function"),
    ),
    "a rule for a class of no layer": (
        lambda: PrecisionRule(dict),
        (TypeError, "subclass of `keras.layers.Layer`"),
    ),
    "a rule for nothing": (
        lambda: PrecisionRule(""),
        (ValueError, "must be a layer path or a glob"),
    ),
    "a rule with an unknown policy": (
        lambda: PrecisionRule("dense", "float17"),
        (ValueError, "`policy` must be one of"),
    ),
    "a rule with a numeric reason": (
        lambda: PrecisionRule("dense", reason=1),
        (TypeError, "`reason` must be a string"),
    ),
    "a rule with sublayers by name": (
        lambda: PrecisionRule("dense", sublayers="all"),
        (TypeError, "`sublayers` must be a boolean"),
    ),
    "a plan of pairs": (
        lambda: PrecisionPlan([("dense", "float32")]),
        (TypeError, "`policies` must be a dict"),
    ),
    "a plan with policy objects": (
        lambda: PrecisionPlan({"dense": keras.DTypePolicy("float32")}),
        (TypeError, "layer path to string"),
    ),
    "a plan with an unknown policy": (
        lambda: PrecisionPlan({"dense": "float17"}),
        (ValueError, "'dense' a policy that Keras does not know"),
    ),
    "a plan without a default": (
        lambda: PrecisionPlan({}, default=None),
        (TypeError, "policy of '<model>' must be a string"),
    ),
    "a reason for no entry": (
        lambda: PrecisionPlan({}, reasons={"dense": "why"}),
        (ValueError, "about paths in `policies`.*dense"),
    ),
    "a diff with a dict": (
        lambda: PLAN.diff({"dense": "float32"}),
        (TypeError, "must be a `PrecisionPlan`.*of type dict"),
    ),
    "a plan of no model": (
        lambda: PrecisionPlan.from_model(None),
        (TypeError, "must be a `keras.Model`"),
    ),
    "a plan applied to no model": (
        lambda: PLAN.apply([]),
        (TypeError, "must be a `keras.Model`"),
    ),
    "a summary of no model": (
        lambda: precision_summary(3),
        (TypeError, "must be a `keras.Model`"),
    ),
    "a summary with no plan": (
        lambda: precision_summary(model(), {}),
        (TypeError, "must be a `PrecisionPlan`"),
    ),
    "an unknown global policy": (
        lambda: set_global_policy("half"),
        (ValueError, "must be one of 'float32'.*policy='half'"),
    ),
    "a global policy with wrong rules": (
        lambda: set_global_policy("float32", rules=[1]),
        (TypeError, "nothing but `PrecisionRule`s"),
    ),
    "a scope of nothing": (
        lambda: policy_scope(None),
        (TypeError, "policy=None"),
    ),
    "a scope that is never entered": (
        lambda: policy_scope("float17"),
        (ValueError, "policy='float17'"),
    ),
}


@pytest.mark.parametrize("call", WRONG)
def test_a_wrong_call_gets_a_clear_error(call):
    make, (kind, message) = WRONG[call]
    with pytest.raises(kind, match=message):
        make()
    assert keras.config.dtype_policy().name == "float32"
