"""The smallest set of layers that has to compute in float32."""

import os
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import keras
import numpy as np

from keras_mixprec._checks import check_choice, check_integer, check_number
from keras_mixprec.analysis.float32_search import (
    Float32Search,
    Limits,
    batches_of,
    identity_of,
    starting_point,
)
from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.batch import (
    build_for,
    to_tensors,
    trains_without_targets,
)
from keras_mixprec.numerics.evaluation import Evaluation, held_back
from keras_mixprec.numerics.layer_hooks import temporary_policies
from keras_mixprec.policies.apply import matcher_of
from keras_mixprec.policies.layers import MODEL_PATH, check_model
from keras_mixprec.policies.plan import PrecisionPlan
from keras_mixprec.policies.rules import PrecisionRule
from keras_mixprec.reporting.run_log import RunLog

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
    """Finds the smallest set of layers that has to compute in float32.

    All else computes in 16 bits, and yet the loss and the gradients are
    float32's within a tolerance, on every batch of the data. The model's own
    `train_step` runs many times without updates. The search adds the least
    exact layers in float32 one by one, and then tries halves of them in 16 bits
    again. No layer in the plan can be spared; of two that could stand in for
    each other, that with the most multiply-adds stays in 16 bits. The model is
    not changed.

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
        tolerance: Float. How far the loss may be off, as a share of float32's.
        gradient_tolerance: Float. How far the gradient of any layer's variables
            may be off, as a share of float32's.
        rules: Iterable of `PrecisionRule`, with the meaning that it has for
            `apply_policy`. Layers that they match follow them, needed or not;
            `[]` leaves everything to the search.
        batch_size: Int. Samples per batch.
        verbose: 0 or 1. `1` shows a progress bar that counts the steps.
        validate_fn: Function of the model that returns a number, or held-back
            data, as `validate` of `PrecisionTuner`. The search evaluates the
            set in inference. It adds the fewest layers that bring the metric
            within `validation_tolerance` of float32's. Defaults to `None`.
        monitor: String. The metric of held-back data that counts, as
            `EarlyStopping` names it. Defaults to `"val_loss"`.
        mode: String. `"min"`, `"max"` or `"auto"`, as for `PrecisionTuner`.
            Defaults to `"auto"`.
        validation_tolerance: Float, in the metric's own unit. How much worse
            than in float32 it may be. Defaults to `0.002`.
        resume: String or path-like, a JSON file that keeps finished trials. A
            search that was killed goes on from there, with the same result;
            tolerances may be others. Defaults to `None`.
        log_dir: String or path-like, a folder to which all trials are logged
            for the tab of TensorBoard. Defaults to `None`.

    Returns:
        A `PrecisionPlan`, not applied yet. The reason of each entry that was
        found says how far off the loss and the worst gradient, or the metric,
        are without it. Its `trade_off` lists all trials: the share of the FLOPs
        in 16 bits, and the error; `.pareto()` has those that no other one is
        better than.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the model is not compiled, the data do not fit it,
            float32 is not finite on them, or no set reaches the tolerance. If
            `monitor` or `mode` is given without `validate_fn`. If `resume` is
            damaged or belongs to another model or other data.
        OSError: If `log_dir` cannot be written to, before anything is tried.

    Warns:
        UserWarning: If a rule in `rules`, other than a default one, matches no
            layer.

    Gradients use the loss scale of the model's optimizer if it is fixed. They
    use 1 if the model computes in float16 without loss scaling. They use the
    scale that fits the gradients of most layers in all other cases. Steps run
    operation by operation: what XLA computes can differ. Another backend can
    differ too, most of all in the dtypes that it lets a layer mix.

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
    limits = Limits(
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
            "The loss of this model needs targets: call "
            "`minimize_float32(model, x, y)`. Received: y=None"
        )
    # The search looks for overflow, so NumPy need not warn of it.
    log_or_none = nullcontext() if log_dir is None else RunLog(log_dir)
    with np.errstate(all="ignore"), log_or_none as log:
        build_for(model, data)
        matcher = matcher_of(model, policy, rules)
        start = starting_point(model, policy, matcher)
        own = {"policy": policy, "batch_size": batch_size}
        known = resume is not None
        asked = identity_of(model, data, start, **own) if known else {}
        batches = batches_of(data, batch_size)
        with temporary_policies(start.assignment()):
            search = Float32Search(
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
    # A plan says why of layers only, and in their order.
    reasons = {p: reasons[p] for p in policies if reasons.get(p)}
    notes = {p: note for p, note in start.notes.items() if p in policies}
    return PrecisionPlan(policies, default, reasons, notes)
