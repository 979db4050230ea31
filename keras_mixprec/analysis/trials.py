"""Trying sets of layers in float32, each set once."""

import contextlib
from collections.abc import Iterable

import keras

from keras_mixprec.diagnosis.end_to_end import EndToEnd, Errors


class Trials:
    """What is known of the errors with some layers in float32.

    Args:
        compared: The `EndToEnd` of the model.
        layers: Dict of path to layer.
        verbose: `0` or `1`. Whether a progress bar counts the trials.
    """

    def __init__(self, compared: EndToEnd, layers: dict, verbose: int):
        self._compared = compared
        self._layers = layers
        self._known = {}
        self._progress = verbose and keras.utils.Progbar(
            None, stateful_metrics=["in_float32"], unit_name="trial"
        )

    def errors(self, paths: Iterable[str]) -> Errors:
        """Returns the errors with the layers at `paths` in float32."""
        paths = frozenset(paths)
        if paths not in self._known:
            wide = [self._layers[path] for path in paths]
            self._known[paths] = self._compared.errors({"float32": wide})
            self._show(paths)
        return self._known[paths]

    @contextlib.contextmanager
    def shown(self):
        """Ends the progress bar's line behind the context."""
        try:
            yield self
        finally:
            if self._progress:
                self._progress.update(len(self._known), finalize=True)

    def _show(self, paths):
        if self._progress:
            values = [("in_float32", len(paths))]
            self._progress.update(len(self._known), values)
