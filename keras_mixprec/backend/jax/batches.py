"""The batches of `fit` on JAX; see `interface.py`."""

import contextlib
import functools
import itertools

import jax
import numpy as np

from keras_mixprec.backend.jax.state import variables_of
from keras_mixprec.keras_internals import (
    holding,
    jax_state,
    stored_value,
)


def tapped(model, train_function, visit, raised=None):
    def train(state, iterator):
        iterator = iter(iterator)
        first = next(iterator)
        own = jax.tree.map(_own_rows, first)
        state = _with_values(model, state, lambda: visit(own))

        def step():
            return train_function(state, itertools.chain([first], iterator))

        try:
            return step()
        except StopIteration:
            # The data has ended, but no step has failed.
            raise
        except Exception as error:
            # A step that has started to run has consumed the donated state, so
            # the step cannot run again.
            taken = any(x.is_deleted() for x in jax.tree.leaves(state))
            if raised is None or taken:
                raise
            answers = []
            ask = functools.partial(raised, error)
            state = _with_values(model, state, lambda: answers.append(ask()))
            if not answers[0]:
                raise
        return step()

    return train


@contextlib.contextmanager
def synchronized(model, variables):
    state, synced = jax_state(model)
    if not state or synced:
        yield
        return
    known = _values(model, state)
    values = [known.get(id(v), stored_value(v)) for v in variables]
    with holding(variables, values):
        yield


def _values(model, state):
    """Returns values of a state by variable id, without trainable variables."""
    values = {}
    for kind, variables in (
        ("optimizer_variables", model.optimizer.variables),
        ("metrics_variables", model.metrics_variables),
        ("non_trainable_variables", model.non_trainable_variables),
    ):
        values |= zip(map(id, variables), state[kind], strict=False)
    return values


def _with_values(model, state, work):
    """Calls `work` while variables have the values of the state.

    Returns the state with the values that `work` left.
    """
    variables = [v for part in variables_of(model) for v in part]
    leaves, structure = jax.tree.flatten(state)
    with holding(variables, leaves):
        work()
        return structure.unflatten([stored_value(v) for v in variables])


def _own_rows(array):
    """Returns the rows of an array that this process's devices hold."""
    if not isinstance(array, jax.Array) or array.is_fully_addressable:
        return array
    rows = {
        shard.index[0].start or 0: shard.data
        for shard in array.addressable_shards
    }
    return jax.numpy.asarray(
        np.concatenate([np.asarray(rows[start]) for start in sorted(rows)])
    )
