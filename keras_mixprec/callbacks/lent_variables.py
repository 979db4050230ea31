"""Variables that metrics have for a while."""

from keras import ops


class LentVariables:
    """Variables that metrics have between `put` and `take`.

    On JAX a step writes no others than those that the model's layers,
    optimizer and metrics have.
    """

    def __init__(self):
        self._lent = []

    def add(self, metric, name: str, shape: tuple = ()):
        """Returns a new variable of a metric, of zeros.

        Args:
            metric: A `keras.metrics.Metric`.
            name: String.
            shape: Tuple of ints. Defaults to that of a scalar.
        """
        variable = metric.add_variable(shape, "zeros", name=name)
        self._lent.append((metric, len(metric._variables) - 1, variable))
        return variable

    def put(self):
        """Gives the metrics their variables again."""
        for metric, position, variable in self._lent:
            metric._variables.insert(position, variable)

    def take(self):
        """Takes the variables away from the metrics.

        At their places, since a compiled step goes by the order.
        """
        for metric, _, variable in reversed(self._lent):
            metric._variables[:] = [
                v for v in metric._variables if v is not variable
            ]

    def clear(self, *but):
        """Sets all variables to 0, those in `but` apart."""
        kept = {id(variable) for variable in but}
        for _, _, variable in self._lent:
            if id(variable) not in kept:
                variable.assign(ops.zeros_like(variable.value))
