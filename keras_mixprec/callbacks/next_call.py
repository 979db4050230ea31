"""Taking the place of a model's train function for one call."""


class NextCall:
    """Lets something else run instead of the next call of a train function.

    Several may wait for the same call; the one armed last goes first.
    """

    def __init__(self):
        self._armed = None

    @property
    def armed(self) -> bool:
        """Whether the call is still to come.

        It never will once the train function has been made anew.
        """
        if self._armed is None:
            return False
        model, tap = self._armed
        function = model.train_function
        while isinstance(function, _Tap) and function is not tap:
            function = function.below
        return function is tap

    def arm(self, model, train_function):
        """`train_function` is called next, and disarms before it trains.

        Instead of one that still waits: an epoch may end without the call.
        """
        self.disarm()
        tap = _Tap(train_function, model.train_function)
        self._armed = model, tap
        model.train_function = tap

    def disarm(self):
        """Puts the model's own function back, unless others still wait."""
        if self._armed is None:
            return
        (model, tap), self._armed = self._armed, None
        tap.waits = False
        while _is_over(model.train_function):
            model.train_function = model.train_function.below


def without_taps(function):
    """Returns the train function below all that stands in for it."""
    while isinstance(function, _Tap):
        function = function.below
    return function


class _Tap:
    """Stands in for a train function, the next call of which is `below`."""

    def __init__(self, train_function, below):
        self.below = below
        self.waits = True
        self._train_function = train_function

    def __call__(self, *args):
        return (self._train_function if self.waits else self.below)(*args)


def _is_over(function):
    return isinstance(function, _Tap) and not function.waits
