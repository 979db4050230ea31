"""Where the variables of a model are made."""

import contextlib


def variable_scope(model):
    """Returns the context in which to make variables for `model`.

    TensorFlow's, of the model's strategy; replicas would share what is made
    outside of it.
    """
    strategy = getattr(model, "distribute_strategy", None)
    return strategy.scope() if strategy else contextlib.nullcontext()
