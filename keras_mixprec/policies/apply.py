"""`apply_policy`, which sets the policies of a model that exists."""

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
    functions that are already compiled. `apply_policy` reaches both, also in
    composites, wrappers and nested models. The model may be built, unbuilt or
    in the midst of `fit`. Variables keep their dtype and the optimizer its
    state. Sublayers that an unbuilt layer makes later get their policy when it
    makes them. If a rule keeps a part of a custom layer in float32 and the
    layer's code cannot mix dtypes, the whole layer computes in float32.

    Args:
        model: A `keras.Model`.
        policy_or_plan: A policy name or `keras.DTypePolicy` for all layers,
            `"auto"` for the policy that `recommend_policy` returns, or a
            `PrecisionPlan`, which is applied exactly as it is. `"float16"` and
            `"bfloat16"` give a built layer with float32 variables the mixed
            policy, because variables keep their dtype.
        rules: Iterable of `PrecisionRule`. Layers that a rule matches follow
            its policy instead. If `None`, a 16-bit policy takes the rules of
            `set_global_policy`, by default `DEFAULT_RULES`, and another policy
            takes none. `[]` takes none, and `[*yours, *DEFAULT_RULES]` takes
            both. Not allowed with a plan.

    Returns:
        The `PrecisionPlan` that the model now follows, with the reason of the
        rule that decided about a layer. Its notes name layers that were left
        alone: quantized layers, and layers that return integers or strings.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If there is no such policy, the plan does not fit the
            model, or rules are given with a plan.

    Warns:
        UserWarning: If a rule in `rules`, other than a default one, matches no
            layer.

    A functional model's symbolic tensors (`layer.output.dtype`) keep the dtype
    from when it was built. This changes neither the layers' results nor the
    model's file.

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
                "A plan is applied exactly as it is; leave out `rules`. "
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

    These exist after `set_global_policy`, which cannot know which layer will be
    the last of a model.

    Args:
        model: A `keras.Model`.

    Returns:
        Dict from their paths to the reason of the rule.
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
