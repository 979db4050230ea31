"""Making the layers of a model follow a policy or a plan."""

import functools
import warnings
import weakref
from collections.abc import Iterable

import keras

from keras_mixprec.policies.casts import without_mixes
from keras_mixprec.policies.default_rules import DEFAULT_RULES
from keras_mixprec.policies.layers import check_model, may_grow, walk
from keras_mixprec.policies.names import (
    fitting_policy,
    is_16_bit,
    is_fixed,
    policy_name,
    set_policy,
)
from keras_mixprec.policies.plan import PrecisionPlan
from keras_mixprec.policies.rules import Matcher, PrecisionRule, PrecisionRules
from keras_mixprec.policies.scope import current_rules, resolve


def after_build(model, entries, follow):
    """Calls `follow` with each layer that appears when others are built.

    Args:
        model: The `keras.Model`.
        entries: List of `LayerEntry`, the layers it has now.
        follow: Function of a `LayerEntry` that sets the layer's policy. It
            replaces what an earlier call registered.
    """
    known = {id(entry.layer) for entry in entries}
    # A strong reference would keep the model alive in a cycle.
    model_ref = weakref.ref(model)

    def adopt():
        for entry in walk(model_ref()):
            if id(entry.layer) not in known:
                known.add(id(entry.layer))
                follow(entry)
                _hook(entry.layer, adopt)

    for layer in [model, *(entry.layer for entry in entries)]:
        _hook(layer, adopt)


def _hook(layer, adopt):
    """Makes a layer call `adopt` once, when it has been built."""
    original = getattr(layer.build, "_mixprec_original", layer.build)
    if not may_grow(layer):
        return

    @functools.wraps(original)
    def build(*args, **kwargs):
        layer.build = original
        before = len(layer._flatten_layers())
        original(*args, **kwargs)
        if len(layer._flatten_layers()) > before:
            adopt()

    build._mixprec_original = original
    layer.build = build


def apply_policy(
    model: keras.Model,
    policy_or_plan: str | keras.DTypePolicy | PrecisionPlan,
    *,
    rules: Iterable[PrecisionRule] | None = None,
) -> PrecisionPlan:
    """Sets the compute dtype of every layer of a model, in place.

    Keras' own `layer.dtype_policy = ...` reaches neither sublayers nor
    functions that are already compiled. This reaches both: composites,
    wrappers and nested models included, on a model that is built, unbuilt or
    in the midst of `fit`. Variables keep their dtype and the optimizer its
    state. Sublayers that an unbuilt layer makes when it is built get their
    policy then. Where a rule widens a part of a layer of your own whose code
    cannot mix dtypes, the whole layer computes in float32.

    Args:
        model: A `keras.Model`.
        policy_or_plan: A policy name or `keras.DTypePolicy` for all layers,
            `"auto"` for what `recommend_policy` says, or a `PrecisionPlan`,
            which is applied exactly as it is. `"float16"` and `"bfloat16"`
            give a built layer with float32 variables the mixed policy,
            because variables keep their dtype.
        rules: Iterable of `PrecisionRule`. Layers they match follow the
            rule's policy instead. `None` takes the rules given to
            `set_global_policy`, else `DEFAULT_RULES`, and these only if the
            policy computes in 16 bits; `[]` takes none, and
            `[*yours, *DEFAULT_RULES]` takes both. Not allowed with a plan.

    Returns:
        The `PrecisionPlan` that the model now follows, with the rule's reason
        for each layer that a rule decided and a note for each layer that was
        left alone (quantized layers, layers that return integers or strings).

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If there is no such policy, the plan does not fit the
            model, or rules are given with a plan.

    Warns:
        UserWarning: If a rule in `rules`, other than a default one, matches no
            layer.

    The dtype that a functional model's symbolic tensors show
    (`layer.output.dtype`) is that of the time it was built; what the layers
    compute, and what is saved, is not affected.

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
        policy_or_plan.validate(model)
        default, decide = policy_or_plan.default, policy_or_plan.decide
    else:
        default = resolve("policy_or_plan", policy_or_plan)
        matcher = matcher_of(model, default, rules)
        decide = _rule_decision(matcher, default)
    exactly = isinstance(policy_or_plan, PrecisionPlan)
    plan = _apply(model, default, decide, exactly)
    rebuild_functions(model)
    return plan


def rebuild_functions(model: keras.Model):
    """Compiles the train, test and predict functions that exist again.

    A compiled function keeps the dtypes it was traced with.

    Args:
        model: A `keras.Model`; models nested in it are looked after too.
    """
    for layer in model._flatten_layers():
        for kind in ("train", "test", "predict"):
            if getattr(layer, f"{kind}_function", None) is not None:
                _make_step_anew(layer, f"{kind}_step")
                getattr(layer, f"make_{kind}_function")(force=True)


def _make_step_anew(model, name):
    # JAX takes the trace of a function that it has compiled before. A method
    # is another object each time; what was put in its place is not.
    step = vars(model).get(name)
    if step is None:
        return
    step = getattr(step, "_keras_mixprec_step", step)

    @functools.wraps(step)
    def anew(*args, **kwargs):
        return step(*args, **kwargs)

    anew._keras_mixprec_step = step
    setattr(model, name, anew)


def matcher_of(model: keras.Model, policy: str, rules) -> Matcher:
    """Returns what finds the rule for each layer of a model.

    To be called by what the user calls, whose caller a warning points to.

    Args:
        model: A `keras.Model`.
        policy: String. The name of the policy for all layers.
        rules: As for `apply_policy`.
    """
    if rules is None:
        rules = current_rules() if is_16_bit(policy) else ()
        rules = PrecisionRules(rules)
    else:
        rules = PrecisionRules(rules)
        if not any(may_grow(layer) for layer in model._flatten_layers()):
            own = [rule for rule in rules if rule not in DEFAULT_RULES]
            PrecisionRules(own).warn_unmatched(model)
    return Matcher(rules, model)


def _rule_decision(matcher, policy):
    """How the rules decide about a layer: a function of a `LayerEntry`."""

    def decide(entry):
        rule = matcher.first(entry)
        return (rule.policy, rule.reason) if rule else (policy, "")

    return decide


def _apply(model, default, decide, exactly):
    entries = walk(model)
    # First decide, then act: a rule that raises leaves the model as it was.
    decisions = [decide(entry) for entry in entries]
    reasons, notes = {}, {}
    for entry, (policy, reason) in zip(entries, decisions, strict=True):
        note = _follow(entry.layer, policy)
        reasons |= {entry.path: reason} if reason else {}
        notes |= {entry.path: note} if note else {}
    _follow(model, default)
    if not exactly:
        reasons |= without_mixes(model, entries, default)
    _warn_kept_variables(notes)
    after_build(model, entries, lambda e: _follow(e.layer, decide(e)[0]))
    return PrecisionPlan.from_model(model, reasons, notes)


_KEPT = "its variables keep their dtype"


def _follow(layer, policy):
    """Sets a layer's policy; returns what is to be said about it, if any."""
    if is_fixed(layer):
        kept = policy_name(layer)
        return "" if kept == policy else f"left alone: it follows {kept}"
    fitting = fitting_policy(layer, policy)
    set_policy(layer, fitting)
    return "" if fitting == policy else f"not {policy}: {_KEPT}"


def _warn_kept_variables(notes):
    kept = [path for path, note in notes.items() if note.endswith(_KEPT)]
    if kept:
        warnings.warn(
            f"{len(kept)} built layer(s), {kept[0]!r} first, have float32 "
            "variables, and variables keep their dtype: these layers follow "
            "the mixed policy, which computes the same.",
            UserWarning,
            stacklevel=4,
        )
