"""The state of a train step on JAX, which `train_step` takes and returns."""


def variables_of(model):
    """Returns the lists of variables whose values make up the state."""
    return (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )


def values_of(*parts):
    """Returns a tuple of the values of lists of variables."""
    return tuple([variable.value for variable in part] for part in parts)


def pairs_of(model, state):
    """Returns pairs of each variable and its value in a state."""
    return [
        pair
        for variables, values in zip(variables_of(model), state, strict=True)
        for pair in zip(variables, values, strict=True)
    ]
