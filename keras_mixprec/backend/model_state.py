"""What the state of a model consists of."""

import keras


def optimizers_of(model: keras.Model) -> dict:
    """Returns the optimizers of a model, by the name of the attribute."""
    return {
        name: value
        for name, value in vars(model).items()
        if isinstance(value, keras.optimizers.Optimizer)
    }


def all_variables(model: keras.Model) -> list:
    """Returns every variable of a model, its metrics and its optimizers."""
    found = [*model.variables, *model.metrics_variables]
    for optimizer in optimizers_of(model).values():
        found += optimizer.variables
    # Keras compares variables by value, so that no set holds them.
    return list({id(variable): variable for variable in found}.values())
