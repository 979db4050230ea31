"""Finds the smallest set of layers that must compute in float32."""

import contextlib
import math
import os
from collections.abc import Iterable
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import tree

from keras_mixprec._checks import check_choice, check_integer, check_number
from keras_mixprec.analysis.resume import (
    ResumeFile,
    check_same,
    fingerprint,
    surroundings,
    unnamed,
)
from keras_mixprec.backend import active
from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.batch import (
    build_for,
    to_tensors,
    trains_without_targets,
)
from keras_mixprec.diagnosis.criterion import (
    Errors,
    is_finite,
    step_criterion,
    worst_errors,
)
from keras_mixprec.diagnosis.scales import scale_in_use
from keras_mixprec.diagnosis.search import instability, smallest_set
from keras_mixprec.diagnosis.step_search import Search
from keras_mixprec.keras_internals import flat_layers, only_runs_graph
from keras_mixprec.numerics.dry_step import exact_step
from keras_mixprec.numerics.evaluation import Evaluation, held_back
from keras_mixprec.numerics.layer_hooks import (
    computing_in,
    temporary_policies,
)
from keras_mixprec.policies.apply import matcher_of
from keras_mixprec.policies.layers import (
    MODEL_PATH,
    LayerEntry,
    check_model,
    walk_with_model,
)
from keras_mixprec.policies.names import is_16_bit, is_fixed, policy_name
from keras_mixprec.policies.plan import PrecisionPlan
from keras_mixprec.policies.rules import Matcher, PrecisionRule
from keras_mixprec.policies.summary import model_share_in_16_bits
from keras_mixprec.reporting.run_log import RunLog
from keras_mixprec.reporting.schema import TRADE_OFF_EVENT

_POLICIES = ("mixed_float16", "mixed_bfloat16")


def minimize_float32(
    model: keras.Model,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    policy: str = "mixed_float16",
    tolerance: float = thresholds.LOSS_ERROR,
    gradient_tolerance: float = thresholds.BACKWARD_ERROR,
    rules: Iterable[PrecisionRule] | None = None,
    batch_size: int = 32,
    verbose: int = 0,
    validate_fn: Any = None,
    monitor: str = "val_loss",
    mode: str = "auto",
    validation_tolerance: float = 0.002,
    resume: str | os.PathLike | None = None,
    log_dir: str | os.PathLike | None = None,
) -> PrecisionPlan:
    """Finds the smallest set of layers that must compute in float32.

    With all other layers in 16 bits, the loss and the gradients of every batch
    stay within a tolerance of their float32 values. The search moves the least
    accurate layers to float32, and doubles their number until the errors are
    small enough. Then the search tries to move layers back to 16 bits, until
    every layer left in float32 is needed. If moving one of two layers is
    enough, the layer with more multiply-adds stays in 16 bits.

    The model's own `train_step` runs many times without updates, and the model
    does not change. Each batch takes dozens of steps, and a step takes a
    few seconds in a large model. Pass a few batches that include extreme
    samples.

    Args:
        model: A compiled `keras.Model`. If some of its layers compute in 16
            bits, the other layers keep their policies.
        x: Inputs: an array, or a list or dict of arrays.
        y: Targets, as `fit` takes them. Defaults to `None`.
        sample_weight: Sample weights. Defaults to `None`.
        policy: String. `"mixed_float16"` or `"mixed_bfloat16"`.
        tolerance: Float. The largest allowed error of the loss, as a share of
            the float32 loss.
        gradient_tolerance: Float. The largest allowed error of any layer's
            gradient, as a share of the float32 gradient.
        rules: Iterable of `PrecisionRule`, as for `apply_policy`. Layers that
            match a rule always follow it. `[]` leaves all layers to the search.
        batch_size: Int. Samples per batch.
        verbose: 0 or 1. `1` shows a progress bar that counts the trials.
        validate_fn: Function that takes the model and returns a number, or
            held-back data, as for `validate` of `PrecisionTuner`. The search
            then moves more layers to float32, as few as possible, until the
            metric is within `validation_tolerance` of float32's. Defaults to
            `None`.
        monitor: String. The metric to read from held-back data, named as for
            `EarlyStopping`. Defaults to `"val_loss"`.
        mode: String. `"min"`, `"max"` or `"auto"`, as for `PrecisionTuner`.
            Defaults to `"auto"`.
        validation_tolerance: Float. How much worse the metric may be than in
            float32, in the metric's own unit. Defaults to `0.002`.
        resume: String or path-like, a JSON file that stores finished trials.
            After an interruption, the same call continues from the file. Only
            the tolerances may change. Defaults to `None`.
        log_dir: String or path-like, a folder in which all trials are logged
            for the TensorBoard tab. Defaults to `None`.

    Returns:
        A `PrecisionPlan`, not applied yet. For each layer that the search moved
        to float32, the reason gives the error or the metric with this layer in
        16 bits. `plan.trade_off` lists all trials with their errors and their
        shares of the FLOPs in 16 bits. `plan.trade_off.pareto()` lists the
        trials that no other trial beats.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the model is not compiled, the data do not fit the model,
            the step in float32 is not finite, or no set reaches the tolerance.
            If `monitor` or `mode` is given without `validate_fn`. If `resume`
            is damaged or belongs to a different model or different data.
        OSError: If `log_dir` cannot be written. This is checked first.

    Warns:
        UserWarning: If a rule in `rules`, other than a default one, matches no
            layer.

    The search uses the optimizer's loss scale if it is fixed, and 1 if the
    model computes in float16 without loss scaling. Otherwise it uses the scale
    that suits the gradients of most layers. Steps run operation by operation,
    so the result under XLA or on a different backend may differ.

    Example:
    >>> inputs = keras.Input((4,))
    >>> x = keras.layers.UnitNormalization(name="norm")(inputs)
    >>> model = keras.Model(inputs, keras.layers.Dense(1, name="head")(x))
    >>> model.compile("adam", "mse")
    >>> x, y = np.full((8, 4), 1e-4), np.ones((8, 1))
    >>> plan = minimize_float32(model, x, y, rules=[])
    >>> dict(plan)
    {'norm': 'float32', 'head': 'mixed_float16'}
    >>> print(plan.reasons["norm"])
    in mixed_float16 the loss is not finite, a layer's gradient is not finite
    """
    check_model(model)
    if not getattr(model, "compiled", False):
        raise ValueError(
            "`model` must be compiled: call `model.compile(...)` first. "
            f"Received: model={model.name!r}"
        )
    check_choice("policy", policy, _POLICIES)
    limits = _Limits(
        check_number("tolerance", tolerance, low=0.0),
        check_number("gradient_tolerance", gradient_tolerance, low=0.0),
        check_number("validation_tolerance", validation_tolerance, low=0.0),
    )
    batch_size = check_integer("batch_size", batch_size, low=1)
    check_choice("verbose", verbose, (0, 1))
    evaluation = None
    if validation := held_back(validate_fn, monitor, mode, "validate_fn"):
        evaluation = Evaluation(model, validation)
    data = to_tensors((x, y, sample_weight), as_in_fit=True)
    if y is None and not trains_without_targets(model, data[0]):
        raise ValueError(
            "The loss of this model needs targets. Call "
            "`minimize_float32(model, x, y)`. Received: y=None"
        )
    # Trials overflow on purpose, so suppress NumPy's warnings.
    with np.errstate(all="ignore"), contextlib.ExitStack() as stack:
        log = None if log_dir is None else stack.enter_context(RunLog(log_dir))
        build_for(model, data)
        matcher = matcher_of(model, policy, rules)
        start = _starting_point(model, policy, matcher)
        own = {"policy": policy, "batch_size": batch_size}
        known = resume is not None
        asked = _identity_of(model, data, start, **own) if known else {}
        batches = _batches_of(data, batch_size)
        with temporary_policies(start.assignment()):
            search = _Search(
                model, batches, start, evaluation, resume, asked, verbose
            )
            causes = search.causes(limits)
            trade_off = search.trade_off()
        if log is not None:
            log.event(log.next_step, trade_off.as_event())
    plan = _plan(start, policy, causes)
    plan.trade_off = trade_off
    return plan


def _plan(start, policy, causes):
    found = {path: f"in {policy} {cause}" for path, cause in causes.items()}
    policies = start.policies | dict.fromkeys(found, "float32")
    reasons = start.reasons | found
    default = policies.pop(MODEL_PATH)
    # Drop the reason for the model itself: a plan has reasons for layers only.
    reasons = {p: reasons[p] for p in policies if reasons.get(p)}
    notes = {p: note for p, note in start.notes.items() if p in policies}
    return PrecisionPlan(policies, default, reasons, notes)


class _Trial(NamedTuple):
    """The errors of a model with some layers in float32.

    Attributes:
        paths: Set of the paths of the layers in float32.
        loss: Float. The error of the loss, as a share.
        gradient: Float. The error of the worst gradient, as a share.
        metric: Float. The metric on held-back data, `None` if not evaluated.
    """

    paths: frozenset
    loss: float
    gradient: float
    metric: float | None = None


class TradeOff(list):
    """The trials of a search: error against share of the FLOPs in 16 bits.

    A list of dicts, most FLOPs in 16 bits first:

    | key | content |
    |---|---|
    | `share_in_16_bits` | share of the FLOPs in 16 bits, 0 to 1 |
    | `error` | see below; `None` if not evaluated |
    | `pareto_optimal` | `True` if no other trial beats it |
    | `float32` | list of the paths of the layers in float32 |
    | `loss_error`, `gradient_error` | errors as shares |
    | `metric` | the metric on held-back data, `None` if not evaluated |

    With held-back data, the error says how much worse the metric is than in
    float32, in the metric's own unit. The error is 0 if the metric is better.
    Without held-back data, the error is the larger of `loss_error` and
    `gradient_error`. The error is infinite if only the step in float32 is
    finite, or if a layer cannot mix the dtypes of its inputs.

    Args:
        points: Iterable of dicts with all keys of the table but
            `pareto_optimal`.
        metric: String. The name of the metric, `""` without one.
    """

    def __init__(self, points: Iterable[dict], metric: str = ""):
        self._metric = metric
        best = math.inf
        for point in sorted(
            points, key=lambda p: (-p["share_in_16_bits"], _error(p))
        ):
            # Points with equal shares are sorted by error, so only the first
            # of them can be optimal.
            self.append({**point, "pareto_optimal": _error(point) < best})
            best = min(best, _error(point))

    def pareto(self) -> list[dict]:
        """Returns the trials that no other trial beats."""
        return [point for point in self if point["pareto_optimal"]]

    def as_event(self) -> dict:
        """Returns the trials as an event for the log."""
        title = "error of loss or gradients (share)"
        if self._metric:
            title = f"{self._metric}: how much worse than in float32"
        return {"kind": TRADE_OFF_EVENT, "title": title, "points": [*self]}


def _error(point):
    error = point["error"]
    return math.inf if error is None or math.isnan(error) else error


class _Start(NamedTuple):
    """The policies of a model's layers before the search.

    Attributes:
        policies: Dict of path to policy name, the model itself included.
        reasons, notes: As in a `PrecisionPlan`.
        candidates: List of `LayerEntry`, the layers that the search may move.
        layers: Dict of path to layer, the model itself included.
    """

    policies: dict
    reasons: dict
    notes: dict
    candidates: list[LayerEntry]
    layers: dict

    def assignment(self) -> dict:
        """Returns a dict from each policy name to its layers."""
        found = {}
        for path, policy in self.policies.items():
            found.setdefault(policy, []).append(self.layers[path])
        return found


def _starting_point(
    model: keras.Model, policy: str, matcher: Matcher
) -> _Start:
    """Returns the policies of all layers before the search.

    Args:
        model: A built `keras.Model`. If any of its layers computes in 16 bits,
            its other layers keep their policies.
        policy: String. The policy of the candidates.
        matcher: The `Matcher` that finds the rule for a layer.
    """
    entries = walk_with_model(model)
    mixed = any(is_16_bit(policy_name(e.layer)) for e in entries)
    layers = {entry.path: entry.layer for entry in entries}
    start = _Start({}, {}, {}, [], layers)
    for entry in entries:
        own, path = policy_name(entry.layer), entry.path
        rule = None if entry.layer is model else matcher.first(entry)
        start.policies[path] = policy
        if is_fixed(entry.layer):
            start.policies[path] = own
            start.notes[path] = f"its policy must stay {own}"
        elif rule:
            start.policies[path] = rule.policy
            start.reasons[path] = rule.reason
        elif mixed and not is_16_bit(own):
            start.policies[path] = own
            start.reasons[path] = f"the model sets its policy to {own}"
        elif not only_runs_graph(entry.layer):
            start.candidates.append(entry)
    return start


# The maximum relative difference of the float32 metric between two processes. A
# larger difference means that the model or the data have changed.
_SAME = 1e-4

_ALL_WIDE = "Even with all layers in float32 that the rules allow, "


class _Limits(NamedTuple):
    """The tolerances for loss, gradients and metric."""

    loss: float
    gradient: float
    metric: float


class _Search:
    """The search for one model, whose layers follow the starting point.

    Args:
        model: A built and compiled `keras.Model`.
        batches: List of batches, as `train_step` takes them.
        start: `_Start`.
        evaluation: `Evaluation`, or `None`.
        resume: As `minimize_float32` takes it.
        asked: As `ResumeFile` takes it.
        verbose: `0` or `1`. `1` shows a progress bar that counts the trials.

    Raises:
        ValueError: If float32 is not finite, or the file belongs to a
            different search.
    """

    def __init__(
        self,
        model: keras.Model,
        batches: list,
        start: _Start,
        evaluation: Any,
        resume: Any,
        asked: dict,
        verbose: int,
    ):
        self._model = model
        self._start = start
        self._evaluation = evaluation
        # `ResumeFile` rejects the file of a different search, so create it
        # before any trial runs.
        self._file = ResumeFile(resume, "trials", asked)
        self._trials = {
            frozenset(paths): _Trial(frozenset(paths), *numbers)
            for paths, *numbers in self._file.found.get("trials", [])
        }
        bits, instabilities = _examine(model, batches, start)
        self._scale = 2.0**bits
        self._criteria = [
            (
                batch,
                step_criterion(model, batch, result=0.0, others=0.0),
            )
            for batch in batches
        ]
        # Reading the property `noise` computes the noise, which must be known
        # before dtypes change.
        for _, criterion in self._criteria:
            criterion.noise  # noqa: B018
        paths = [entry.path for entry in start.candidates]
        self._ranked = sorted(paths, key=lambda p: -instabilities.get(p, 0.0))
        self._reference = evaluation.reference() if evaluation else None
        self._check_reference(resume)
        self._progress = verbose and keras.utils.Progbar(
            None, stateful_metrics=["in_float32"], unit_name="trial"
        )

    def causes(self, limits: _Limits) -> dict:
        """Returns the layers to keep in float32, each with its reason."""
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
            trials.setdefault(wide, _Trial(wide, 0.0, 0.0, self._reference))
        return TradeOff(map(self._point, trials.values()), name)

    def _causes(self, limits):
        found = smallest_set(
            self._ranked,
            lambda paths: self._errors(paths).within(*limits[:2]),
        )
        if found is None:
            policies = self._start.policies
            fixed = self._start.reasons | self._start.notes
            kept = {p: policies[p] for p in fixed if is_16_bit(policies[p])}
            raise ValueError(
                f"{_ALL_WIDE}{_describe(self._errors(self._ranked))}. Raise "
                f"`tolerance` or `gradient_tolerance`. Kept in 16 bits: {kept}."
                f" Received: tolerance={limits.loss}, "
                f"gradient_tolerance={limits.gradient}"
            )
        causes = {p: _describe(self._errors(found - {p})) for p in found}
        if not self._evaluation:
            return causes
        others = [path for path in self._ranked if path not in found]
        # The trade-off needs the metric with no layer in float32.
        self._metric(())

        def fits(paths):
            return self._worse_by(self._metric(found | paths)) <= limits.metric

        more = smallest_set(others, fits)
        if more is None:
            raise ValueError(
                f"{_ALL_WIDE}{self._named(self._metric(self._ranked))}. Raise "
                "`validation_tolerance`. "
                f"Received: validation_tolerance={limits.metric}"
            )
        return causes | {
            path: self._named(self._metric((found | more) - {path}))
            for path in more
        }

    def _errors(self, paths: Iterable[str]) -> Errors:
        """Returns the errors with the layers at `paths` in float32."""
        paths = frozenset(paths)
        if paths not in self._trials:
            with computing_in("float32", self._layers(paths)):
                errors = worst_errors(self._model, self._criteria, self._scale)
            self._done(_Trial(paths, *map(float, errors)))
        return Errors(*self._trials[paths][1:3])

    def _metric(self, paths):
        """Returns the metric with the layers at `paths` in float32."""
        paths = frozenset(paths)
        self._errors(paths)
        trial = self._trials[paths]
        if trial.metric is None:
            wide = {"float32": self._layers(paths)}
            metric = math.nan
            # If the backend cannot mix the dtypes within a layer, the metric
            # stays NaN, so the search rejects the trial.
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
        """Raises if the metric in float32 has changed."""
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
        return (
            f"{name} is {value:.6g}, against {self._reference:.6g} in float32"
        )


def _batches_of(data: tuple, size: int) -> list:
    """Returns batches of `(x, y, sample_weight)` for `train_step`.

    Args:
        data: Tuple of three structures of tensors.
        size: Int. Samples per batch.
    """
    count = len(next(x for x in tree.flatten(data) if x is not None))

    def batch(first):
        part = slice(first, first + size)
        return keras.utils.pack_x_y_sample_weight(
            *tree.map_structure(lambda x: x if x is None else x[part], data)
        )

    return [*map(batch, range(0, count, size))]


def _identity_of(
    model: keras.Model, data: tuple, start: _Start, **arguments
) -> dict:
    """Returns a short string for each input that the errors depend on.

    Args:
        model: A built and compiled `keras.Model`.
        data: `(x, y, sample_weight)`, tensors.
        start: `_Start`.
        **arguments: Further arguments of the search.
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
    """Returns log2 of the loss scale, and the instabilities by path."""
    given, adapts, *_ = scale_in_use(model)
    dtypes = {layer.compute_dtype for layer in flat_layers(model)}
    # A float32 model has no loss scaling yet, so predict its loss scale.
    adapts = adapts or (given == 0.0 and "float16" not in dtypes)
    found, lowest = {}, math.inf
    paths = {entry.path for entry in start.candidates}
    for batch in batches:
        exact = exact_step(model, batch)
        if not is_finite(exact):
            raise ValueError(
                "In float32, the loss or a gradient is not finite on these "
                "data, so precision is not the cause. Call "
                "`keras_mixprec.diagnose`."
            )
        bits = given
        if adapts:
            search = Search(model, batch, exact, compiled=False)
            bits = search.predict_scale_bits()
        # An overflow on any batch lowers a dynamic loss scale, so the batch
        # with the lowest scale decides.
        lowest = min(lowest, bits)
        for call in exact.calls:
            if call.path in paths:
                own = instability(call, 2.0**bits)
                found[call.path] = max(found.get(call.path, 0.0), own)
    return lowest, found


def _describe(errors):
    if math.isnan(errors.loss):
        return "a layer cannot mix its dtypes"
    return (
        f"the loss is {_off(errors.loss)}, "
        f"a layer's gradient is {_off(errors.gradient)}"
    )


def _off(error):
    if math.isinf(error):
        return "not finite"
    return f"off by {error:.1%}" if error < 10 else f"off by {error:.0e}x"
