"""`lint`: checks a model before training."""

import contextlib
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import keras

from keras_mixprec._checks import check_list
from keras_mixprec.analysis.lint import (
    data_rules,
    layer_rules,
    optimizer_rules,
)
from keras_mixprec.analysis.lint.findings import Findings, Rule
from keras_mixprec.analysis.lint.model_view import ModelView
from keras_mixprec.numerics.layer_hooks import temporary_policies
from keras_mixprec.policies.apply import matcher_of
from keras_mixprec.policies.layers import check_model, walk
from keras_mixprec.policies.names import fitting_policy
from keras_mixprec.policies.scope import resolve


def lint(
    model: keras.Model,
    x: Any = None,
    y: Any = None,
    *,
    policy: str | keras.DTypePolicy | None = None,
    callbacks: Iterable[keras.callbacks.Callback] = (),
    select: Iterable[str] = ("KMP",),
    ignore: Iterable[str] = (),
) -> Findings:
    """Checks a model before training for faults in 16 bits.

    Rules read the shapes, dtypes, arguments and weights of layers, the graph,
    the optimizer and the `train_step`. With `x`, rules read the data too, and
    `diagnose` runs a step on some samples, in float32 and in 16 bits. Most
    faults show up only in this step. The model does not change.

    Args:
        model: A `keras.Model`, compiled or not. With `x`, it may be unbuilt.
        x: Arrays of samples, as `fit` takes them. Defaults to `None`.
        y: Arrays of targets. With `y`, the step includes the loss of a
            compiled model. Defaults to `None`.
        policy: Policy to check the model under, as `apply_policy(model,
            policy)` would set it. Defaults to `None`: the model's own policies.
        callbacks: List of the callbacks that `fit` will get. Defaults to none.
        select: List of codes of rules, such as `"KMP101"`, or their beginnings,
            such as `"KMP4"`. Defaults to all rules.
        ignore: List of codes of rules to leave out. Defaults to none.

    Returns:
        `Findings`, a sequence of `Finding`s, most severe first. Print it, or
        call `.to_dict()`, `.to_json()`, `.to_html()` or `.at_least(severity)`.
        `.apply()` makes all automatic repairs.

    Raises:
        TypeError: If `model` is not a `keras.Model`, or `callbacks` is not a
            list of callbacks.
        ValueError: If there is no such policy or code, or `x` or `y` are not
            arrays.

    Example:
    >>> inputs = keras.Input((4,))
    >>> x = keras.layers.Rescaling(1e-9, name="to_scale")(inputs)
    >>> model = keras.Model(inputs, keras.layers.Dense(8, name="head")(x))
    >>> plan = apply_policy(model, "mixed_float16", rules=[])
    >>> findings = lint(model)
    >>> findings[0].rule, findings[0].layer
    ('argument_beyond_format', 'to_scale')
    >>> findings.apply("high")["to_scale"]
    'float32'
    """
    check_model(model)
    rules = chosen(select, ignore)
    name = None if policy is None else resolve("policy", policy)
    with _as_if(model, name):
        view = ModelView(model, x, y, callbacks, supposed=name is not None)
        found = [finding for rule in rules for finding in rule.findings(view)]
    return Findings(found, model, name, ran=x is not None)


def _as_if(model, policy):
    """Context in which layers have the policies that `apply_policy` sets."""
    if policy is None:
        return contextlib.nullcontext()
    matcher = matcher_of(model, policy, None)
    assignment = defaultdict(list)
    for entry in walk(model):
        match = matcher.first(entry)
        wanted = match.policy if match else policy
        assignment[fitting_policy(entry.layer, wanted)].append(entry.layer)
    assignment[fitting_policy(model, policy)].append(model)
    return temporary_policies(assignment)


_FILES = (data_rules, layer_rules, optimizer_rules)

# The rules are sorted by code, because findings with the same severity are
# listed in the order of the rules.
RULES = sorted(
    (x for file in _FILES for x in vars(file).values() if isinstance(x, Rule)),
    key=lambda rule: rule.code,
)


def chosen(
    select: Iterable[str] = ("KMP",), ignore: Iterable[str] = ()
) -> list[Rule]:
    """Returns the rules whose codes are selected and not ignored.

    Args:
        select: List of codes, or of their beginnings, such as `"KMP4"`.
        ignore: List of codes of rules to leave out.

    Raises:
        TypeError: If `select` or `ignore` is not a list.
        ValueError: If no rule has such a code.
    """
    starts = []
    for name, codes in (("select", select), ("ignore", ignore)):
        codes = check_list(name, codes, str, "a list of codes")
        for code in codes:
            if not any(rule.code.startswith(code) for rule in RULES):
                raise ValueError(
                    f"`{name}` must be codes of rules, such as 'KMP101' or "
                    f"'KMP1'. Received: {name}={codes!r}"
                )
        starts.append(tuple(codes))
    return [
        rule
        for rule in RULES
        if rule.code.startswith(starts[0])
        and not rule.code.startswith(starts[1])
    ]
