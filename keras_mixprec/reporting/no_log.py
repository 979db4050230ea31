"""The log of a run that nobody wants one of."""


class NoLog:
    """Takes what a `RunLog` takes and keeps nothing."""

    next_step = 0

    def _ignore(self, *args):
        pass

    event = scalars = text = layers = heat = histogram = _ignore

    def close(self):
        """Nothing is open."""
