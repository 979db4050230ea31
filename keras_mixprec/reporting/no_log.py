"""The log of a run that nobody wants one of."""


class NoLog:
    """Takes what a `RunLog` takes and keeps nothing."""

    next_step = 0
    skipped = {}
    folder = ""

    def _ignore(self, *args, **options):
        pass

    event = scalars = text = layers = layout = _ignore
    heat = histogram = scale_rows = settings = _ignore

    def close(self):
        """Nothing is open."""
