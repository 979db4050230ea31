"""Taking the place of a model's train function for one call."""


class NextCall:
    """Lets something else run instead of the next call of a train function."""

    def __init__(self):
        self._replaced = None

    @property
    def armed(self) -> bool:
        """Whether the call is still to come."""
        return self._replaced is not None

    def arm(self, model, train_function):
        """`train_function` is called next, and disarms before it trains."""
        self._replaced = model, model.train_function, train_function
        model.train_function = train_function

    def disarm(self):
        """Puts the model's own function back, unless it was made anew."""
        if self._replaced is None:
            return
        model, own, train_function = self._replaced
        if model.train_function is train_function:
            model.train_function = own
        self._replaced = None
