"""The search for the smallest set of layers that has to be float32."""

import math
from typing import NamedTuple

import keras
from keras import tree

from keras_mixprec.analysis.ranking import add_instabilities
from keras_mixprec.analysis.trade_off import TradeOff, Trial
from keras_mixprec.analysis.trials import Trials
from keras_mixprec.diagnosis.compare import effective_update
from keras_mixprec.diagnosis.end_to_end import EndToEnd
from keras_mixprec.diagnosis.scales import scale_in_use
from keras_mixprec.diagnosis.smallest_set import rank, smallest_set
from keras_mixprec.diagnosis.step_search import Search
from keras_mixprec.keras_internals import flat_layers
from keras_mixprec.numerics.dry_step import exact_step
from keras_mixprec.numerics.layer_hooks import temporary_policies
from keras_mixprec.policies.names import is_16_bit
from keras_mixprec.policies.summary import shares_in_16_bits


class Limits(NamedTuple):
    """The tolerances of loss, gradients and metric, as given."""

    loss: float
    gradient: float
    metric: float


class Float32Search:
    """The search of one model, whose layers follow the starting point.

    Args:
        model: A built and compiled `keras.Model`.
        start: `StartingPoint`.
        evaluation: `Evaluation`, or `None`.
        file: `TrialFile`.
    """

    def __init__(self, model, start, evaluation, file):
        self._model = model
        self._start = start
        self._evaluation = evaluation
        self._file = file
        self._compared = self._reference = None
        self._ranked = []

    def examine(self, batches):
        """Ranks the layers, and computes what is compared with."""
        known = self._file.examined
        if not known:
            bits = _given_scale_bits(self._model)
            known = _examine(self._model, batches, self._start, bits)
            self._file.examined = known
        bits, instabilities = known
        self._compared = EndToEnd(self._model, batches, bits)
        if not self._compared.finite:
            raise _not_finite()
        ranked = rank(self._start.candidates, instabilities)
        self._ranked = [entry.path for entry in ranked]
        if self._evaluation:
            self._reference = self._evaluation.reference()
        self._file.check_reference(self._reference)

    def trials(self, verbose):
        """Returns the `Trials`."""
        return Trials(
            lambda wide: self._compared.errors({"float32": wide}),
            self._start,
            self._evaluation,
            self._file,
            verbose,
        )

    def causes(self, trials, limits):
        """Returns, by path of the set, what is wrong without that layer."""
        causes = _causes(trials, self._ranked, limits, self._start)
        if not self._evaluation:
            return causes
        found = frozenset(causes)
        others = [path for path in self._ranked if path not in found]
        trials.metric(())  # Where the curve begins.

        def fits(paths):
            value = trials.metric(found | paths)
            return self._worse_by(value) <= limits.metric

        more = smallest_set(others, fits)
        if more is None:
            value = self._named(trials.metric(self._ranked))
            raise ValueError(
                f"Even with all layers in float32 that may be, {value}. Allow "
                "more with `validation_tolerance`. Received: "
                f"validation_tolerance={limits.metric}"
            )
        return causes | {
            path: self._named(trials.metric((found | more) - {path}))
            for path in more
        }

    def trade_off(self, trials):
        """Returns the `TradeOff` of all trials."""
        points = [self._point(trial) for trial in trials.all()]
        name = self._evaluation.held_back.name if self._evaluation else ""
        wide = self._share(self._ranked)
        if not wide:
            wide = Trial(frozenset(self._ranked), 0.0, 0.0, self._reference)
            known = {trial.paths for trial in trials.all()}
            points += [self._point(wide)] * (wide.paths not in known)
        return TradeOff(points, name)

    def _point(self, trial):
        error = max(trial.loss, trial.gradient)
        if math.isnan(trial.loss):
            error = math.inf
        if self._evaluation:
            error = None
            if trial.metric is not None:
                error = max(self._worse_by(trial.metric), 0.0)
        return {
            "share_in_16_bits": self._share(trial.paths),
            "error": error,
            "float32": sorted(trial.paths),
            "loss_error": trial.loss,
            "gradient_error": trial.gradient,
            "metric": trial.metric,
        }

    def _share(self, paths):
        wide = [self._start.layers[path] for path in paths]
        with temporary_policies({"float32": wide}):
            return shares_in_16_bits(self._model).flops

    def _worse_by(self, value):
        return self._evaluation.worse_by(value, self._reference)

    def _named(self, value):
        name = self._evaluation.held_back.name
        return f"{name} is {value:.6g}, in float32 {self._reference:.6g}"


def batches_of(data: tuple, size: int) -> list:
    """Returns the batches of `(x, y, sample_weight)`, as `train_step` takes.

    Args:
        data: Tuple of three structures of tensors.
        size: Int. Samples per batch.
    """
    count = len(next(x for x in tree.flatten(data) if x is not None))

    def part(first):
        return tree.map_structure(
            lambda x: None if x is None else x[first : first + size], data
        )

    return [
        keras.utils.pack_x_y_sample_weight(*part(first))
        for first in range(0, count, size)
    ]


def _given_scale_bits(model):
    """The loss scale as a power of two; None for what suits the gradients."""
    bits, adapts, *_ = scale_in_use(model)
    dtypes = {layer.compute_dtype for layer in flat_layers(model)}
    # A float32 model scales no loss yet.
    later = bits == 0.0 and "float16" not in dtypes
    return None if adapts or later else bits


def _examine(model, batches, start, given):
    """Returns the loss scale bits, and the instabilities by path."""
    instabilities, lowest = {}, math.inf
    paths = {e.path for e in start.candidates}
    effective = effective_update(model)
    for batch in batches:
        exact = exact_step(model, batch)
        if not math.isfinite(exact.loss):
            raise _not_finite()
        bits = given
        if bits is None:
            search = Search(model, batch, exact, compiled=False)
            bits = search.predict_scale_bits(effective)
        # A scale that adapts stays below what any batch overflows at.
        lowest = min(lowest, bits)
        add_instabilities(instabilities, exact, paths, 2.0**bits)
    return lowest, instabilities


def _causes(trials, ranked, limits, start):
    """Returns what each layer of the set causes in 16 bits."""
    found = smallest_set(
        ranked, lambda paths: trials.errors(paths).within(*limits[:2])
    )
    if found is None:
        resolved = start.reasons | start.notes
        others = {p: start.policies[p] for p in resolved}
        others = {p: q for p, q in others.items() if is_16_bit(q)}
        raise ValueError(
            "Even with all layers in float32 that may be, "
            f"{_describe(trials.errors(ranked))}. Allow more with `tolerance` "
            f"and `gradient_tolerance`. Kept in 16 bits: {others}."
            f" Received: tolerance={limits[0]}, gradient_tolerance={limits[1]}"
        )
    return {path: _describe(trials.errors(found - {path})) for path in found}


def _describe(errors):
    if math.isnan(errors.loss):
        return "its dtype and those of its neighbours do not mix"
    return (
        f"the loss is {_off(errors.loss)}, "
        f"a layer's gradient is {_off(errors.gradient)}"
    )


def _off(error):
    if math.isinf(error):
        return "not finite"
    return f"off by {error:.1%}" if error < 10 else f"{error:.0e} times off"


def _not_finite():
    return ValueError(
        "In float32 the loss or a gradient is not finite on these data, so "
        "precision is not what is wrong; `keras_mixprec.diagnose` says more."
    )
