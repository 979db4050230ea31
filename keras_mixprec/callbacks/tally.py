"""Counting what was not finite, by kind, over the runs in a log."""

from collections.abc import Callable, Mapping

from keras_mixprec.nonfinite_kinds import KINDS


class Tally:
    """What was not finite since a `fit` started, and in its log before.

    Args:
        tag: String. What its curves are called, each with a kind behind it.
        read: Function that returns the counts by kind, as of now.
        earlier: Dict from tags to what earlier runs counted.
    """

    def __init__(self, tag: str, read: Callable, earlier: Mapping):
        self._tags = {kind: f"{tag}/{kind}" for kind in KINDS}
        self._read, self._first = read, read()
        self._earlier = earlier

    def counts(self) -> dict:
        """Returns how often each kind was seen since the start."""
        now = self._read()
        return {kind: now[kind] - self._first[kind] for kind in KINDS}

    def curves(self) -> dict:
        """Returns tag -> count in the whole log, of the kinds ever seen."""
        counts = {
            self._tags[kind]: count + self._earlier.get(self._tags[kind], 0)
            for kind, count in self.counts().items()
        }
        return {tag: count for tag, count in counts.items() if count > 0}
