"""The smallest set of layers that has to compute in float32."""

import contextlib
import math
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
from keras import tree

from keras_mixprec._checks import check_choice, check_integer, check_number
from keras_mixprec.analysis.ranking import (
    add_instabilities,
    rank,
    starting_point,
)
from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.batch import build_for, to_tensors
from keras_mixprec.diagnosis.compare import effective_update
from keras_mixprec.diagnosis.end_to_end import EndToEnd, Errors
from keras_mixprec.diagnosis.layer_search import Search
from keras_mixprec.diagnosis.scales import scale_in_use
from keras_mixprec.diagnosis.smallest_set import smallest_set
from keras_mixprec.keras_internals import flat_layers
from keras_mixprec.numerics.dry_step import exact_step
from keras_mixprec.numerics.layer_hooks import temporary_policies
from keras_mixprec.policies.apply import matcher_of
from keras_mixprec.policies.layers import MODEL_PATH, check_model
from keras_mixprec.policies.names import is_16_bit
from keras_mixprec.policies.plan import PrecisionPlan
from keras_mixprec.policies.rules import PrecisionRule


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
) -> PrecisionPlan:
    """Finds the smallest set of layers that has to compute in float32.

    All else computes in 16 bits, and yet the loss and the gradients are
    float32's within a tolerance, on every batch of the data. The model's own
    `train_step` runs many times with its optimizers held: with nothing in
    float32; then with the layers that are the least exact, each by itself, in
    float32; then with halves of those in 16 bits again. No layer in the plan
    can be spared; of two that could stand in for each other, that with the
    most multiply-adds stays in 16 bits. Nothing is changed in the model.

    A step takes some seconds in a large model, and each batch takes dozens:
    give it a few batches, with the extremes of the data among them.

    Args:
        model: A compiled `keras.Model`. If some of its layers compute in 16
            bits, those that do not stay as they are. One that is float32
            throughout resolves nothing.
        x: Inputs: an array, or a list or dict of arrays.
        y: Their targets. Defaults to `None`.
        sample_weight: Their weights. Defaults to `None`.
        policy: String. `"mixed_float16"` or `"mixed_bfloat16"`.
        tolerance: Float. Share by which the loss may be off.
        gradient_tolerance: Float. Share by which the gradient of any layer's
            variables may be off.
        rules: Iterable of `PrecisionRule`, with the meaning that it has for
            `apply_policy`. What they match follows them, needed or not; `[]`
            leaves everything to the search.
        batch_size: Int. Samples per batch.
        verbose: 0 or 1. Whether a progress bar counts the steps.

    Returns:
        A `PrecisionPlan`, not applied yet. The reason of each entry that was
        found says how far off the loss and the worst gradient are without it.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the model is not compiled, the data do not fit it,
            float32 is not finite on them, or no set reaches the tolerance.

    Warns:
        UserWarning: If a rule in `rules`, other than a default one, matches no
            layer.

    Gradients are taken at the loss scale of the model's optimizer if that is
    a fixed one, at 1 if the model computes in float16 without any, and else
    at the one that the gradients of most layers fit. Steps run operation by
    operation: what XLA computes can differ. So can another backend, above all
    in which dtypes run side by side within one layer.

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
            "`model` must be compiled, since its loss and gradients are what "
            "is compared: call `model.compile(...)` first. "
            f"Received: model={model.name!r}"
        )
    check_choice("policy", policy, _POLICIES)
    limits = (
        check_number("tolerance", tolerance, low=0.0),
        check_number("gradient_tolerance", gradient_tolerance, low=0.0),
    )
    batch_size = check_integer("batch_size", batch_size, low=1)
    check_choice("verbose", verbose, (0, 1))
    data = to_tensors((x, y, sample_weight))
    # Constants that overflow float16 are what is looked for.
    with np.errstate(all="ignore"):
        build_for(model, data)
        matcher = matcher_of(model, policy, rules)
        start = starting_point(model, policy, matcher)
        batches = _batches(data, batch_size)
        bits = _given_scale_bits(model)
        with temporary_policies(start.assignment()):
            bits, instabilities = _examine(model, batches, start, bits)
            compared = EndToEnd(model, batches, bits)
            if not compared.finite:
                raise _not_finite()
            ranked = [e.path for e in rank(start.candidates, instabilities)]
            with Trials(compared, start.layers, verbose).shown() as trials:
                causes = _causes(trials, ranked, limits, start)
    return _plan(start, policy, causes)


def _batches(data, size):
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
    """Returns the errors that each layer of the set causes in 16 bits."""
    found = smallest_set(
        ranked, lambda paths: trials.errors(paths).within(*limits)
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
    return {path: trials.errors(found - {path}) for path in found}


def _plan(start, policy, causes):
    found = {
        path: f"in {policy} {_describe(errors)}"
        for path, errors in causes.items()
    }
    policies = start.policies | dict.fromkeys(found, "float32")
    reasons = start.reasons | found
    default = policies.pop(MODEL_PATH)
    # A plan says why of layers only, and in their order.
    reasons = {p: reasons[p] for p in policies if reasons.get(p)}
    notes = {p: note for p, note in start.notes.items() if p in policies}
    return PrecisionPlan(policies, default, reasons, notes)


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
