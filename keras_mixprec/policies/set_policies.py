"""Sets the policies that rules or a plan chose for the layers of a model."""

import functools
import warnings
import weakref
from collections.abc import Callable

import keras

from keras_mixprec.keras_internals import flat_layers
from keras_mixprec.policies.casts import without_mixes
from keras_mixprec.policies.layers import STAND_IN, may_grow, walk
from keras_mixprec.policies.names import (
    fitting_policy,
    is_fixed,
    policy_name,
    set_policy,
)

# The name of the model's attribute with the reasons for its layers' policies.
_REASONS_ATTRIBUTE = "_keras_mixprec_reasons"


def set_policies(
    model: keras.Model, default: str, decide: Callable, exactly: bool = True
) -> tuple[dict, dict]:
    """Sets the policy of every layer, even of layers that are created later.

    Call it from a public function: a warning points to that function's caller.

    Args:
        model: A `keras.Model`.
        default: String. The name of the model's own policy.
        decide: Function that takes a `LayerEntry` and returns a policy name and
            the reason.
        exactly: Boolean. If `False`, a layer whose own code cannot mix dtypes
            computes entirely in float32. Defaults to `True`.

    Returns:
        Two dicts of layer path to string: reasons, and notes on layers that
        kept their policy.
    """
    entries = walk(model)
    # Make all decisions first: if a rule raises, no layer has changed.
    decisions = [decide(entry) for entry in entries]
    reasons, notes, kept = {}, {}, {}
    for entry, (policy, reason) in zip(entries, decisions, strict=True):
        if exactly and policy_name(entry.layer) == policy:
            kept[entry.path] = reasons_of(model).get(entry.path, "")
        note = _set_layer_policy(entry.layer, policy)
        reasons |= {entry.path: reason} if reason else {}
        notes |= {entry.path: note} if note else {}
    _set_layer_policy(model, default)
    if not exactly:
        reasons |= without_mixes(model, entries, default)
    _warn_kept_variables(notes)
    _after_build(
        model, entries, lambda e: _set_layer_policy(e.layer, decide(e)[0])
    )
    rebuild_functions(model)
    kept = {path: reason for path, reason in kept.items() if reason}
    vars(model)[_REASONS_ATTRIBUTE] = kept | reasons
    return reasons, notes


def reasons_of(model: keras.Model) -> dict:
    """Returns the reasons from the last call to `set_policies`.

    Args:
        model: A `keras.Model`.

    Returns:
        Dict of layer path to string; empty before the first call.
    """
    return vars(model).get(_REASONS_ATTRIBUTE, {})


def add_reasons(model: keras.Model, reasons: dict):
    """Adds reasons for layers that have none yet.

    Args:
        model: A `keras.Model`.
        reasons: Dict of layer path to string.
    """
    if reasons:
        vars(model)[_REASONS_ATTRIBUTE] = reasons | reasons_of(model)


def has_set(model: keras.Model) -> bool:
    """Returns whether `set_policies` has set the policies of a model."""
    return _REASONS_ATTRIBUTE in vars(model)


def rebuild_functions(model: keras.Model):
    """Rebuilds the existing train, test and predict functions.

    A compiled function would keep the dtypes that it was traced with.

    Args:
        model: A `keras.Model`. Functions of nested models are rebuilt too.
    """
    for layer in flat_layers(model):
        for kind in ("train", "test", "predict"):
            if getattr(layer, f"{kind}_function", None) is not None:
                _wrap_replaced_step(layer, f"{kind}_step")
                getattr(layer, f"make_{kind}_function")(force=True)


def _wrap_replaced_step(model, name):
    # JAX caches traces by function object. A bound method is a new object at
    # each access, but a `train_step` in an attribute stays the same object. It
    # needs a new wrapper, or JAX would reuse the old trace.
    step = vars(model).get(name)
    if step is None:
        return
    step = getattr(step, STAND_IN, step)

    @functools.wraps(step)
    def fresh(*args, **kwargs):
        return step(*args, **kwargs)

    setattr(fresh, STAND_IN, step)
    setattr(model, name, fresh)


_KEPT_DTYPE_NOTE = "its variables keep their dtype"


def _set_layer_policy(layer, policy):
    """Sets a layer's policy, and returns a note if it uses a different one."""
    if is_fixed(layer):
        kept = policy_name(layer)
        return "" if kept == policy else f"left alone: it follows {kept}"
    fitting = fitting_policy(layer, policy)
    set_policy(layer, fitting)
    return "" if fitting == policy else f"not {policy}: {_KEPT_DTYPE_NOTE}"


def _warn_kept_variables(notes):
    kept = [
        path for path, note in notes.items() if note.endswith(_KEPT_DTYPE_NOTE)
    ]
    if kept:
        warnings.warn(
            f"{len(kept)} built layer(s), such as {kept[0]!r}, have float32 "
            "variables, which keep their dtype. These layers follow the mixed "
            "policy instead, which computes the same.",
            UserWarning,
            stacklevel=4,
        )


def _after_build(model, entries, set_late):
    """Calls `set_late` for each layer that the `build` of a layer creates.

    Args:
        model: The `keras.Model`.
        entries: List of `LayerEntry`, the layers of the model now.
        set_late: Function of a `LayerEntry` that sets the layer's policy. It
            replaces the function that an earlier call passed.
    """
    known = {id(entry.layer) for entry in entries}
    # A strong reference to the model would form a cycle and keep the model
    # alive.
    model_ref = weakref.ref(model)

    def adopt():
        for entry in walk(model_ref()):
            if id(entry.layer) not in known:
                known.add(id(entry.layer))
                set_late(entry)
                _hook(entry.layer, adopt)

    for layer in [model, *(entry.layer for entry in entries)]:
        _hook(layer, adopt)


def _hook(layer, adopt):
    """Makes a layer call `adopt` once, if its `build` adds sublayers."""
    original = getattr(layer.build, "_mixprec_original", layer.build)
    if not may_grow(layer):
        return

    @functools.wraps(original)
    def build(*args, **kwargs):
        layer.build = original
        before = len(flat_layers(layer))
        original(*args, **kwargs)
        if len(flat_layers(layer)) > before:
            adopt()

    build._mixprec_original = original
    layer.build = build
