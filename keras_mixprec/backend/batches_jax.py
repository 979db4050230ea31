"""Looking into `fit` on JAX; see `batches.py`."""

import contextlib
import itertools

import jax


def tapped(model, train_function, look):
    def train(state, iterator):
        iterator = iter(iterator)
        first = next(iterator)
        state = _with_values(model, state, lambda: look(first))
        return train_function(state, itertools.chain([first], iterator))

    return train


@contextlib.contextmanager
def newest(model, variables):
    state = getattr(model, "_jax_state", None)
    if not state or model._jax_state_synced:
        yield
        return
    values = _values(model, state, {id(v) for v in variables})
    before = [v._value for v in variables]
    for variable in variables:
        variable._value = values.get(id(variable), variable._value)
    try:
        yield
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable._value = value


def _values(model, state, wanted):
    """The values of a state by the ids of variables, all wanted among them."""
    values = {}
    # Where they are most likely first: of a train step of the user's own other
    # optimizers may be anywhere. A trainable variable is never asked for.
    for kind in ("optimizer", "metrics", "non_trainable"):
        if not wanted <= values.keys():
            owner = model.optimizer if kind == "optimizer" else model
            name = "variables" if kind == "optimizer" else f"{kind}_variables"
            known = map(id, getattr(owner, name))
            values |= zip(known, state[f"{kind}_variables"], strict=False)
    return values


def _with_values(model, state, work):
    """Does the work while variables have the values that `fit` keeps.

    Returns the values that they have then.
    """
    variables = [
        *model.trainable_variables,
        *model.non_trainable_variables,
        *model.optimizer.variables,
        *model.metrics_variables,
    ]
    before = [v._value for v in variables]
    leaves, structure = jax.tree.flatten(state)
    for variable, value in zip(variables, leaves, strict=True):
        variable._value = value
    try:
        work()
        return structure.unflatten([v._value for v in variables])
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable._value = value
