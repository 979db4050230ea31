"""The next batch on JAX; see `batches.py`."""

import itertools

import jax


def tapped(model, train_function, look):
    def train(state, iterator):
        iterator = iter(iterator)
        first = next(iterator)
        _with_values(model, state, lambda: look(first))
        return train_function(state, itertools.chain([first], iterator))

    return train


def _with_values(model, state, work):
    """Does the work while variables have the values that `fit` keeps."""
    variables = [
        *model.trainable_variables,
        *model.non_trainable_variables,
        *model.optimizer.variables,
        *model.metrics_variables,
    ]
    before = [v._value for v in variables]
    for variable, value in zip(variables, jax.tree.leaves(state), strict=True):
        variable._value = value
    try:
        work()
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable._value = value
