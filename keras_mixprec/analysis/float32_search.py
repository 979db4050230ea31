"""The search for the smallest set of layers that has to be float32."""

import contextlib
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import keras
from keras import tree

from keras_mixprec.analysis.resume import (
    ResumeFile,
    check_same,
    fingerprint,
    surroundings,
    unnamed,
)
from keras_mixprec.backend import active
from keras_mixprec.diagnosis.criterion import (
    Errors,
    is_finite,
    step_criterion,
    worst_errors,
)
from keras_mixprec.diagnosis.scales import scale_in_use
from keras_mixprec.diagnosis.search import instability, smallest_set
from keras_mixprec.diagnosis.step_search import Search
from keras_mixprec.formats import (
    format_names,
    format_share,
    printable,
    text_table,
)
from keras_mixprec.keras_internals import flat_layers, only_runs_graph
from keras_mixprec.numerics.dry_step import exact_step
from keras_mixprec.numerics.layer_hooks import (
    computing_in,
    temporary_policies,
)
from keras_mixprec.policies.layers import LayerEntry, walk_with_model
from keras_mixprec.policies.names import is_16_bit, is_fixed, policy_name
from keras_mixprec.policies.rules import Matcher
from keras_mixprec.policies.summary import model_share_in_16_bits
from keras_mixprec.reporting.schema import TRADE_OFF_EVENT


class Trial(NamedTuple):
    """How far a model is off with some layers in float32.

    Attributes:
        paths: Set of their paths.
        loss: Float. How far the loss is off, as a share.
        gradient: Float. How far the worst gradient is off, as a share.
        metric: Float. The metric on held-back data, `None` if not evaluated.
    """

    paths: frozenset
    loss: float
    gradient: float
    metric: float | None = None


class TradeOff(Sequence):
    """The trials of a search: share of the FLOPs in 16 bits against error.

    A sequence of dicts, most FLOPs in 16 bits first:

    | key | what |
    |---|---|
    | `share_in_16_bits` | share of the FLOPs in 16 bits, 0 to 1 |
    | `error` | how far off: see below; `None` if not evaluated |
    | `pareto_optimal` | whether no trial is better in one and as good in both |
    | `float32` | list of the paths of the layers that were in float32 |
    | `loss_error`, `gradient_error` | shares by which these are off |
    | `metric` | the metric on held-back data, `None` if not evaluated |

    With held-back data the error is how much worse the metric is than in
    float32, in its own unit, 0 if it is better. Without such data the error is
    the larger of the errors of loss and gradients. It is infinite if only
    float32 is finite, or if dtypes do not mix.

    Args:
        points: Iterable of dicts with all these keys but `pareto_optimal`.
        metric: String. The name of the metric, `""` without one.
    """

    def __init__(self, points: Iterable[dict], metric: str = ""):
        self._metric = metric
        points = sorted(
            points, key=lambda p: (-p["share_in_16_bits"], _error(p))
        )
        best, self._points = math.inf, []
        for point in points:
            # The first one of equal share is the best of them.
            optimal = _error(point) < best
            best = min(best, _error(point))
            self._points.append({**point, "pareto_optimal": optimal})

    def __getitem__(self, index):
        return self._points[index]

    def __len__(self):
        return len(self._points)

    def pareto(self) -> list[dict]:
        """Returns the trials that no other one is better than."""
        return [point for point in self if point["pareto_optimal"]]

    def to_list(self) -> list[dict]:
        """Returns all of them as a list of dicts."""
        return [dict(point) for point in self]

    def as_event(self) -> dict:
        """Returns what the log keeps of it."""
        title = "error of loss or gradients (share)"
        if self._metric:
            title = f"{self._metric} worse than in float32 by"
        points = self.to_list()
        return {"kind": TRADE_OFF_EVENT, "title": title, "points": points}

    def __str__(self):
        rows = [("16 bits", "error", "float32")]
        for point in self.pareto():
            names = format_names(point["float32"], 4) or "nothing"
            share = format_share(point["share_in_16_bits"])
            rows.append((share, f"{_error(point):.4g}", names))
        return printable("\n".join(text_table(rows)))


def _error(point):
    error = point["error"]
    return math.inf if error is None or math.isnan(error) else error


class StartingPoint(NamedTuple):
    """The policies of a model's layers before the search.

    Attributes:
        policies: Dict of path to policy name, the model itself included.
        reasons, notes: As in a `PrecisionPlan`.
        candidates: List of `LayerEntry`, what may go to float32 or not.
        layers: Dict of path to layer, the model itself included.
    """

    policies: dict
    reasons: dict
    notes: dict
    candidates: list[LayerEntry]
    layers: dict

    def assignment(self) -> dict:
        """Returns the layers that follow each policy, by its name."""
        found = {}
        for path, policy in self.policies.items():
            found.setdefault(policy, []).append(self.layers[path])
        return found


def starting_point(
    model: keras.Model, policy: str, matcher: Matcher
) -> StartingPoint:
    """Returns what the rules, the model and the layers themselves resolve.

    Args:
        model: A built `keras.Model`. If any of its layers computes in 16
            bits, those that do not are meant to.
        policy: String. What everything else follows.
        matcher: The `Matcher` that finds the rule for a layer.
    """
    entries = walk_with_model(model)
    mixed = any(is_16_bit(policy_name(e.layer)) for e in entries)
    layers = {entry.path: entry.layer for entry in entries}
    start = StartingPoint({}, {}, {}, [], layers)
    for entry in entries:
        own, path = policy_name(entry.layer), entry.path
        rule = None if entry.layer is model else matcher.first(entry)
        start.policies[path] = policy
        if is_fixed(entry.layer):
            start.policies[path] = own
            start.notes[path] = f"left alone: it follows {own}"
        elif rule:
            start.policies[path] = rule.policy
            start.reasons[path] = rule.reason
        elif mixed and not is_16_bit(own):
            start.policies[path] = own
            start.reasons[path] = f"the model keeps it in {own}"
        elif not only_runs_graph(entry.layer):
            start.candidates.append(entry)
    return start


# The float32 metric may differ by this share in another process.
_SAME = 1e-4


class Limits(NamedTuple):
    """The tolerances of loss, gradients and metric, as given."""

    loss: float
    gradient: float
    metric: float


class Float32Search:
    """The search of one model, whose layers follow the starting point.

    Args:
        model: A built and compiled `keras.Model`.
        batches: List of batches, as `train_step` takes them.
        start: `StartingPoint`.
        evaluation: `Evaluation`, or `None`.
        resume: As `minimize_float32` takes it.
        asked: Dict of what the errors depend on, for a file to resume from.
        verbose: `0` or `1`. `1` shows a progress bar that counts the trials.

    Raises:
        ValueError: If float32 is not finite, or the file is of another search.
    """

    def __init__(
        self,
        model: keras.Model,
        batches: list,
        start: StartingPoint,
        evaluation: Any,
        resume: Any,
        asked: dict,
        verbose: int,
    ):
        self._model = model
        self._start = start
        self._evaluation = evaluation
        # A file of another search is refused before any trial.
        self._file = ResumeFile(resume, "trials", asked)
        self._trials = {
            frozenset(paths): Trial(frozenset(paths), *numbers)
            for paths, *numbers in self._file.found.get("trials", [])
        }
        bits, instabilities = _examine(model, batches, start)
        self._scale = 2.0**bits
        self._criteria = [
            (batch, step_criterion(model, batch, result=0.0, others=0.0))
            for batch in batches
        ]
        for _, criterion in self._criteria:
            criterion.noise  # noqa: B018  As the weights and dtypes are now.
        paths = [entry.path for entry in start.candidates]
        self._ranked = sorted(paths, key=lambda p: -instabilities.get(p, 0.0))
        self._reference = evaluation.reference() if evaluation else None
        self._check_reference(resume)
        self._progress = verbose and keras.utils.Progbar(
            None, stateful_metrics=["in_float32"], unit_name="trial"
        )

    def causes(self, limits: Limits) -> dict:
        """Returns, by path of the set, what is wrong without that layer."""
        try:
            return self._causes(limits)
        finally:
            if self._progress:
                self._progress.update(len(self._trials), finalize=True)

    def trade_off(self) -> TradeOff:
        """Returns the `TradeOff` of all trials."""
        trials = {**self._trials}
        name = self._evaluation.held_back.name if self._evaluation else ""
        wide = frozenset(self._ranked)
        if not self._share(wide):
            trials.setdefault(wide, Trial(wide, 0.0, 0.0, self._reference))
        return TradeOff(map(self._point, trials.values()), name)

    def _causes(self, limits):
        found = smallest_set(
            self._ranked,
            lambda paths: self._errors(paths).within(*limits[:2]),
        )
        if found is None:
            resolved = self._start.reasons | self._start.notes
            kept = {p: self._start.policies[p] for p in resolved}
            kept = {p: q for p, q in kept.items() if is_16_bit(q)}
            raise ValueError(
                "Even with all layers in float32 that the rules allow, "
                f"{_describe(self._errors(self._ranked))}. Allow more with "
                f"`tolerance` and `gradient_tolerance`. Kept in 16 bits: "
                f"{kept}. Received: tolerance={limits.loss}, "
                f"gradient_tolerance={limits.gradient}"
            )
        causes = {p: _describe(self._errors(found - {p})) for p in found}
        if not self._evaluation:
            return causes
        others = [path for path in self._ranked if path not in found]
        self._metric(())  # This is the first point of the curve.

        def fits(paths):
            return self._worse_by(self._metric(found | paths)) <= limits.metric

        more = smallest_set(others, fits)
        if more is None:
            raise ValueError(
                "Even with all layers in float32 that the rules allow, "
                f"{self._named(self._metric(self._ranked))}. Allow more with "
                "`validation_tolerance`. Received: "
                f"validation_tolerance={limits.metric}"
            )
        return causes | {
            path: self._named(self._metric((found | more) - {path}))
            for path in more
        }

    def _errors(self, paths: Iterable[str]) -> Errors:
        """The errors with the layers at `paths` in float32."""
        paths = frozenset(paths)
        if paths not in self._trials:
            with computing_in("float32", self._layers(paths)):
                errors = worst_errors(self._model, self._criteria, self._scale)
            self._done(Trial(paths, *map(float, errors)))
        return Errors(*self._trials[paths][1:3])

    def _metric(self, paths):
        """The metric with the layers at `paths` in float32."""
        paths = frozenset(paths)
        self._errors(paths)
        trial = self._trials[paths]
        if trial.metric is None:
            wide = {"float32": self._layers(paths)}
            metric = math.nan
            # Some backends refuse to mix some dtypes within a layer.
            with contextlib.suppress(*active.replay().REFUSALS):
                metric = self._evaluation.with_policies(wide)
            self._done(trial._replace(metric=metric))
        return self._trials[paths].metric

    def _done(self, trial):
        self._trials[trial.paths] = trial
        self._file.found = {
            "reference": self._reference,
            "trials": [
                [sorted(t.paths), *t[1:]] for t in self._trials.values()
            ],
        }
        self._file.save()
        if self._progress:
            values = [("in_float32", len(trial.paths))]
            self._progress.update(len(self._trials), values)

    def _check_reference(self, resume):
        """Raises if the metric was another one in float32."""
        now, then = self._reference, self._file.found.get("reference")
        if None in (now, then) or math.isclose(now, then, rel_tol=_SAME):
            return
        name = "the metric in float32"
        check_same(resume, {name: now}, {name: then})

    def _layers(self, paths):
        return [self._start.layers[path] for path in paths]

    def _share(self, paths):
        with temporary_policies({"float32": self._layers(paths)}):
            return model_share_in_16_bits(self._model)

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


def identity_of(
    model: keras.Model, data: tuple, start: StartingPoint, **arguments
) -> dict:
    """Returns what the errors of a search depend on, as short strings.

    Args:
        model: A built and compiled `keras.Model`.
        data: `(x, y, sample_weight)`, tensors.
        start: `StartingPoint`.
        **arguments: Further arguments that they depend on.
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


def _examine(model, batches, start):
    """The loss scale as a power of two, and the instabilities by path."""
    given, adapts, *_ = scale_in_use(model)
    dtypes = {layer.compute_dtype for layer in flat_layers(model)}
    # A float32 model scales no loss yet.
    adapts = adapts or (given == 0.0 and "float16" not in dtypes)
    found, lowest = {}, math.inf
    paths = {entry.path for entry in start.candidates}
    for batch in batches:
        exact = exact_step(model, batch)
        if not is_finite(exact):
            raise _not_finite()
        bits = given
        if adapts:
            search = Search(model, batch, exact, compiled=False)
            bits = search.predict_scale_bits()
        # A scale that adapts stays below what any batch overflows at.
        lowest = min(lowest, bits)
        for call in exact.calls:
            if call.path in paths:
                own = instability(call, 2.0**bits)
                found[call.path] = max(found.get(call.path, 0.0), own)
    return lowest, found


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
