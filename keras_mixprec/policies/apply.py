"""`apply_policy`, which sets the policies of an existing model."""

from collections.abc import Iterable

import keras

from keras_mixprec.keras_internals import flat_layers
from keras_mixprec.policies.default_rules import DEFAULT_RULES
from keras_mixprec.policies.layers import check_model, may_grow, walk
from keras_mixprec.policies.names import is_16_bit
from keras_mixprec.policies.plan import PrecisionPlan
from keras_mixprec.policies.rules import Matcher, PrecisionRule, PrecisionRules
from keras_mixprec.policies.scope import current_rules, resolve
from keras_mixprec.policies.set_policies import set_policies


def apply_policy(
    model: keras.Model,
    policy_or_plan: str | keras.DTypePolicy | PrecisionPlan,
    *,
    rules: Iterable[PrecisionRule] | None = None,
) -> PrecisionPlan:
    """Sets the compute dtype of every layer of a model, in place.

    Keras' own `layer.dtype_policy = ...` reaches neither sublayers nor
    functions that are already compiled. `apply_policy` reaches both, even
    inside composites, wrappers and nested models. The model may be built,
    unbuilt or in training. Variables keep their dtype, and the optimizer keeps
    its state. A sublayer that an unbuilt layer creates later gets its policy at
    that time. If a rule keeps part of a custom layer in float32, but the
    layer's code cannot mix dtypes, the whole layer computes in float32.

    Args:
        model: A `keras.Model`.
        policy_or_plan: A policy name or `keras.DTypePolicy` for all layers,
            `"auto"` for the policy that `recommend_policy` returns, or a
            `PrecisionPlan`, which is applied exactly as it is. `"float16"` and
            `"bfloat16"` give a built layer with float32 variables the mixed
            policy, because variables keep their dtype.
        rules: Iterable of `PrecisionRule`. A layer follows the policy of the
            first rule that matches it. With `None`, a 16-bit policy uses the
            rules of `set_global_policy` (by default `DEFAULT_RULES`), and other
            policies use no rules. Pass `[]` for no rules, or `[*yours,
            *DEFAULT_RULES]` to add yours. Not allowed with a plan.

    Returns:
        The `PrecisionPlan` that the model now follows, with the reasons of the
        rules. Its notes name layers that kept their policy: quantized layers,
        and layers that return integers or strings.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If there is no such policy, the plan does not fit the
            model, or rules are given with a plan.

    Warns:
        UserWarning: If a rule in `rules`, other than a default one, matches no
            layer.

    The symbolic tensors of a functional model (`layer.output.dtype`) keep their
    old dtype. This affects neither the layers' results nor the saved model.

    Example:
    >>> inputs = keras.Input((5, 8))
    >>> x = keras.layers.MultiHeadAttention(2, 4)(inputs, inputs)
    >>> model = keras.Model(inputs, keras.layers.Dense(1, name="head")(x))
    >>> plan = apply_policy(model, "mixed_bfloat16")
    >>> plan["multi_head_attention/query"], plan["head"]
    ('mixed_bfloat16', 'float32')
    """
    check_model(model)
    if isinstance(policy_or_plan, PrecisionPlan):
        if rules is not None:
            raise ValueError(
                "A plan is applied exactly as it is, so leave out `rules`. "
                f"Received: rules={rules!r}"
            )
        return policy_or_plan.apply(model)
    default = resolve("policy_or_plan", policy_or_plan)
    matcher = matcher_of(model, default, rules)

    def decide(entry):
        rule = matcher.first(entry)
        return (rule.policy, rule.reason) if rule else (default, "")

    reasons, notes = set_policies(model, default, decide, exactly=False)
    return PrecisionPlan.from_model(model, reasons, notes)


def left_in_float16(model: keras.Model) -> dict[str, str]:
    """Returns layers in float16 that the default rules keep in float32.

    A model made under `set_global_policy` has such layers, because a new layer
    does not know yet whether it will be the model's output.

    Args:
        model: A `keras.Model`.

    Returns:
        Dict of layer path to the rule's reason.
    """
    matcher = Matcher(DEFAULT_RULES, model)
    narrow = [e for e in walk(model) if e.layer.compute_dtype == "float16"]
    return {e.path: r.reason for e in narrow if (r := matcher.first(e))}


def matcher_of(model: keras.Model, policy: str, rules) -> Matcher:
    """Returns the `Matcher` of rules for a model.

    Call it from a public function: a warning points to that function's caller.

    Args:
        model: A `keras.Model`.
        policy: String. The name of the policy for all layers.
        rules: As for `apply_policy`.
    """
    if rules is None:
        return Matcher(current_rules() if is_16_bit(policy) else (), model)
    rules = PrecisionRules(rules)
    if not any(may_grow(layer) for layer in flat_layers(model)):
        own = [rule for rule in rules if rule not in DEFAULT_RULES]
        PrecisionRules(own).warn_unmatched(model)
    return Matcher(rules, model)
