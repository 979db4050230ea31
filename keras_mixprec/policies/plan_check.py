"""What makes a plan valid, in itself and for a model."""

import difflib
from collections.abc import Mapping

import keras

from keras_mixprec.policies.layers import keras_path, may_grow, walk
from keras_mixprec.policies.names import POLICY_NAMES, policy_name


def check_entries(policies, default, reasons, notes):
    """Returns the three dicts of a plan, or raises saying what is wrong."""
    policies = _check_texts("policies", policies)
    for path, policy in {**policies, "<model>": default}.items():
        _check_known(path, policy)
    reasons = _check_texts("reasons", reasons or {})
    notes = _check_texts("notes", notes or {})
    strangers = [path for path in {**reasons, **notes} if path not in policies]
    if strangers:
        raise ValueError(
            "`reasons` and `notes` must be about paths in `policies`. "
            f"Received: {strangers}"
        )
    return policies, reasons, notes


def problems(plan, model) -> list[str]:
    """Returns one line for each thing that keeps a plan from fitting.

    Args:
        plan: Mapping of layer path to policy name.
        model: A `keras.Model`.
    """
    entries = {entry.path: entry for entry in walk(model)}
    unknown = [
        f"unknown path {path!r}: {_advice(path, entries)}"
        for path in plan
        if path not in entries and not _may_appear(path, entries, model)
    ]
    missing = [
        f"missing layer {path!r}: the plan does not say what it follows"
        for path, entry in entries.items()
        if not any(holder.path in plan for holder in entry.lineage())
    ]
    unsettable = [
        f"policy {plan[path]!r} of {path!r} cannot be set: the layer follows "
        f"{policy_name(entry.layer)!r}; quantize it first"
        for path, entry in entries.items()
        if plan.get(path, "float32") not in POLICY_NAMES
        and plan[path] != policy_name(entry.layer)
    ]
    return unknown + missing + unsettable


def _may_appear(path, entries, model):
    """Whether an unbuilt layer above the path may still make it."""
    while "/" in path:
        path = path.rpartition("/")[0]
        if path in entries:
            return may_grow(entries[path].layer)
    return may_grow(model)


def _advice(path, entries):
    ours = {keras_path(entry): p for p, entry in entries.items()}
    if path in ours:
        return (
            f"that is the name Keras gave it in this process; its path is "
            f"{ours[path]!r}"
        )
    ends = [p for p in entries if p.endswith(f"/{path}")]
    if len(ends) > 1:
        return f"ambiguous, it could be {' or '.join(map(repr, ends))}"
    near = ends or difflib.get_close_matches(path, entries, n=1, cutoff=0)
    return f"the nearest is {near[0]!r}" if near else "the model has no layers"


def _check_texts(name, value):
    if not isinstance(value, Mapping):
        raise TypeError(
            f"`{name}` must be a dict of layer path to string. "
            f"Received: {name}={value!r} of type {type(value).__name__}"
        )
    for path, text in value.items():
        if not isinstance(path, str) or not isinstance(text, str):
            raise TypeError(
                f"`{name}` must be a dict of layer path to string. "
                f"Received: {name}[{path!r}]={text!r}"
            )
    return dict(value)


def _check_known(path, policy):
    if not isinstance(policy, str):
        raise TypeError(
            f"The policy of {path!r} must be a string. "
            f"Received: {policy!r} of type {type(policy).__name__}"
        )
    try:
        keras.dtype_policies.get(policy)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"The plan gives {path!r} a policy that Keras does not know. "
            f"Received: {policy!r}"
        ) from error
