"""The trials of a search for float32 layers: errors, the metric, their file."""

import contextlib
import math
from collections.abc import Callable, Iterable
from typing import Any

import keras

from keras_mixprec.analysis.ranking import StartingPoint
from keras_mixprec.analysis.resume import (
    ResumeFile,
    check_same,
    fingerprint,
    surroundings,
    unnamed,
)
from keras_mixprec.analysis.trade_off import Trial
from keras_mixprec.backend import active
from keras_mixprec.diagnosis.end_to_end import Errors

# Share by which the metric in float32 may differ in another process.
_SAME = 1e-4


class Trials:
    """What is known of the errors with some layers in float32.

    Args:
        compute: Function of layers, which are in float32 then, to `Errors`.
        start: `StartingPoint`.
        evaluation: `Evaluation` of the model, `None` without held-back data.
        file: `TrialFile`.
        verbose: `0` or `1`. Whether a progress bar counts the trials.
    """

    def __init__(
        self,
        compute: Callable,
        start: StartingPoint,
        evaluation: Any,
        file: "TrialFile",
        verbose: int,
    ):
        self._compute = compute
        self._layers = start.layers
        self._evaluation = evaluation
        self._file = file
        self._known = file.trials
        self._progress = verbose and keras.utils.Progbar(
            None, stateful_metrics=["in_float32"], unit_name="trial"
        )

    def errors(self, paths: Iterable[str]) -> Errors:
        """Returns the errors with the layers at `paths` in float32."""
        paths = frozenset(paths)
        if paths not in self._known:
            errors = self._compute([self._layers[path] for path in paths])
            self._known[paths] = Trial(paths, *map(float, errors))
            self._done(paths)
        return Errors(*self._known[paths][1:3])

    def metric(self, paths: Iterable[str]) -> float:
        """Returns the metric with the layers at `paths` in float32."""
        paths = frozenset(paths)
        self.errors(paths)
        known = self._known[paths].metric
        if known is None:
            wide = [self._layers[path] for path in paths]
            try:
                known = self._evaluation.with_policies({"float32": wide})
            # Some backends refuse to mix some dtypes within a layer.
            except active.replay().REFUSALS:
                known = math.nan
            self._known[paths] = self._known[paths]._replace(metric=known)
            self._done(paths)
        return known

    def all(self) -> list[Trial]:
        """Returns all trials, in the order made."""
        return [*self._known.values()]

    @contextlib.contextmanager
    def shown(self):
        """Ends the progress bar's line behind the context."""
        try:
            yield self
        finally:
            if self._progress:
                self._progress.update(len(self._known), finalize=True)

    def _done(self, paths):
        self._file.save()
        if self._progress:
            values = [("in_float32", len(paths))]
            self._progress.update(len(self._known), values)


class TrialFile:
    """Keeps what a search has found, for when it is killed.

    Args:
        path: String or path-like, `None` for no file.
        identity: Dict from what a search depends on to a string each, that of
            another model or other data is another.

    Attributes:
        examined: Tuple of the loss scale's power of two and a dict from path to
            instability, `None` before these are known.
        trials: Dict from the set of paths in float32 to `Trial`.
    """

    def __init__(self, path: Any, identity: dict):
        self._file = ResumeFile(path, "trials", identity)
        self._path = path
        found = self._file.found
        self.examined = found.get("examined")
        self._reference = found.get("reference")
        self.trials: dict[frozenset, Trial] = {}
        for paths, *numbers in found.get("trials", []):
            self.trials[frozenset(paths)] = Trial(frozenset(paths), *numbers)

    def check_reference(self, value: float | None) -> None:
        """Raises `ValueError` if the metric was another one in float32.

        Args:
            value: Float. What it is now, `None` if there is none.
        """
        known, self._reference = self._reference, value
        if known is None or value is None:
            return
        if not math.isclose(known, value, rel_tol=_SAME):
            name = "the metric in float32"
            now, then = {name: f"{value:g}"}, {name: f"{known:g}"}
            check_same(self._path, "search", now, then)

    def save(self) -> None:
        """Writes all of it, at once or not at all."""
        self._file.found = {
            "examined": self.examined,
            "reference": self._reference,
            "trials": [[sorted(t.paths), *t[1:]] for t in self.trials.values()],
        }
        self._file.save()


def identity_of(
    model: keras.Model, data: tuple, start: StartingPoint, **arguments
) -> dict:
    """Returns what the errors of a search depend on, as short strings.

    Args:
        model: A built and compiled `keras.Model`.
        data: `(x, y, sample_weight)`, tensors.
        start: `StartingPoint`.
        **arguments: What else they depend on.
    """
    layers = [(path, type(x).__name__) for path, x in start.layers.items()]
    config = getattr(model.optimizer, "get_config", lambda: None)()
    return {
        "the layers": fingerprint(layers),
        "the policies": fingerprint(start.policies),
        "the weights": fingerprint([v.value for v in model.weights]),
        "the data": fingerprint(data),
        "the loss or the optimizer": fingerprint(
            type(model.optimizer), unnamed(config), model.loss
        ),
        **{f"`{name}`": repr(value) for name, value in arguments.items()},
        **surroundings(),
    }
