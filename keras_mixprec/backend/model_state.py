"""What the state of a model consists of."""

import keras


def optimizers_of(model: keras.Model) -> dict:
    """Returns the optimizers of a model, by the name of the attribute.

    One that has several names is `"optimizer"`, or what it was called first.
    """
    found = {
        name: value
        for name, value in vars(model).items()
        if isinstance(value, keras.optimizers.Optimizer)
    }
    names = sorted(found, key=lambda name: name != "optimizer")
    first = {id(found[name]): name for name in reversed(names)}
    return {name: o for name, o in found.items() if first[id(o)] == name}


def all_variables(model: keras.Model) -> list:
    """Returns every variable of a model, its metrics and its optimizers."""
    found = [*model.variables, *model.metrics_variables]
    for optimizer in optimizers_of(model).values():
        found += optimizer.variables
    # Keras compares variables by value, so that no set holds them.
    return list({id(variable): variable for variable in found}.values())
