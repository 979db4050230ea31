"""Letting layers compute in another dtype for a while."""

import contextlib

from keras_mixprec.policies.names import (
    is_fixed,
    narrow_inputs,
    set_input_dtype,
    set_policy,
)


@contextlib.contextmanager
def computing_in(policy: str, layers):
    """Gives `layers` a policy within the context, their own after it.

    Compiled functions are left as they are, since nothing calls them here.
    """
    before = [(layer, layer._dtype_policy) for layer in layers]
    narrow = [x for layer in layers for x in narrow_inputs(layer)]
    inputs = [(x, x.dtype) for x in narrow]
    for layer, _ in before:
        if not is_fixed(layer):
            set_policy(layer, policy)
    try:
        yield
    finally:
        for layer, own in before:
            layer._dtype_policy = own
        for entrance, dtype in inputs:
            set_input_dtype(entrance, dtype)


@contextlib.contextmanager
def following(assignment: dict):
    """Gives layers several policies within the context, as `computing_in`.

    Args:
        assignment: Dict of policy name to list of layers.
    """
    with contextlib.ExitStack() as stack:
        for policy, layers in assignment.items():
            stack.enter_context(computing_in(policy, layers))
        yield


def with_sublayers(layer) -> list:
    """Returns the layer and everything inside it."""
    return list(layer._flatten_layers())
