"""Looking into `fit` on JAX; see `interface.py`."""

import contextlib
import itertools

import jax

from keras_mixprec.backend.jax.arrays import holding, own_rows


def tapped(model, train_function, look):
    def train(state, iterator):
        iterator = iter(iterator)
        first = next(iterator)
        own = jax.tree.map(own_rows, first)
        state = _with_values(model, state, lambda: look(own))
        return train_function(state, itertools.chain([first], iterator))

    return train


@contextlib.contextmanager
def synchronized(model, variables):
    state = getattr(model, "_jax_state", None)
    if not state or model._jax_state_synced:
        yield
        return
    known = _values(model, state, {id(v) for v in variables})
    values = [known.get(id(v), v._value) for v in variables]
    with holding(variables, values):
        yield


def _values(model, state, wanted):
    """The values of a state by the ids of variables, all wanted among them."""
    values = {}
    # Where they are most likely first: of a train step of the user's own other
    # optimizers may be anywhere. A trainable variable is never asked for.
    for kind, owner, name in (
        ("optimizer_variables", model.optimizer, "variables"),
        ("metrics_variables", model, "metrics_variables"),
        ("non_trainable_variables", model, "non_trainable_variables"),
    ):
        if not wanted <= values.keys():
            known = map(id, getattr(owner, name))
            values |= zip(known, state[kind], strict=False)
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
    leaves, structure = jax.tree.flatten(state)
    with holding(variables, leaves):
        work()
        return structure.unflatten([v._value for v in variables])
