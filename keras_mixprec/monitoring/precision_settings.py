"""Logs the settings of a run that affect precision."""

from collections import Counter
from collections.abc import Sequence

import keras

from keras_mixprec.backend import active
from keras_mixprec.formats import SIXTEEN_BITS
from keras_mixprec.numerics.arrays import to_array
from keras_mixprec.policies import graph_rewrite, matmul_precision
from keras_mixprec.policies.layers import has_own_step, walk
from keras_mixprec.policies.names import is_16_bit
from keras_mixprec.policies.plan import PrecisionPlan
from keras_mixprec.policies.scope import global_policy, lost_policy
from keras_mixprec.policies.set_policies import has_set
from keras_mixprec.reporting.dashboards import CHARTS, METRICS, SETTINGS

# Arguments of `MixPrecMonitor` that are logged, so that a run can be
# reproduced.
_ARGUMENTS = "update_freq", "probe_every", "max_overhead"


def settings_of(model: keras.Model) -> dict:
    """Returns the settings that distinguish runs in the HParams tab.

    Args:
        model: A built and compiled `keras.Model`.

    Returns:
        Dict from names in `SETTINGS` to values.
    """
    policies = Counter(PrecisionPlan.from_model(model).values())
    optimizer = getattr(model, "optimizer", None)
    settings: dict = {"matmul_precision": matmul_precision.in_force().products}
    if policies:
        settings["policy"] = policies.most_common(1)[0][0]
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        # A user's subclass of Keras' `LossScaleOptimizer` has no update rule of
        # this package, so log the name of the subclass.
        rule = getattr(optimizer, "rule", optimizer)
        settings["loss_scale"] = type(rule).__name__
        scale = optimizer.initial_scale
        if optimizer.built:
            scale = active.step().read(optimizer.dynamic_scale)
        settings["first_loss_scale"] = float(scale)
        optimizer = optimizer.inner_optimizer
    if optimizer is not None:
        settings["optimizer"] = type(optimizer).__name__
        # With a learning rate schedule, log the first rate. A `MultiOptimizer`
        # has several rates, so log none of them.
        if (rate := getattr(optimizer, "learning_rate", None)) is not None:
            settings["learning_rate"] = float(to_array(rate))
    return settings


def log_begin(watch, before_training: Sequence):
    """Logs the start of a `fit`, with its settings.

    Args:
        watch: The `Watch`.
        before_training: Sequence of dicts, further events to log.
    """
    log, model, step = watch.log, watch.model, watch.step
    settings, products = settings_of(model), matmul_precision.in_force()
    log.layout(step, CHARTS)
    log.settings(settings, SETTINGS, METRICS)
    event = {
        "kind": "train_begin",
        "fit": log.fits + 1,
        "tuner": watch.tuning is not None,
        "matmul_precision": str(products),
        "settings": {
            **settings,
            "log_dir": str(watch.settings.log_dir),
            **{name: getattr(watch.settings, name) for name in _ARGUMENTS},
            "device": products.where,
        },
    }
    if has_own_step(model):
        event["own_step"] = True
    if rewrite := graph_rewrite.in_force():
        event["graph_rewrite"] = rewrite.dtype
    log.event(step, event)
    layers = [entry.layer for entry in walk(model)]
    dtypes = {layer.compute_dtype for layer in layers}
    if layers and not rewrite and dtypes.isdisjoint(SIXTEEN_BITS):
        log.event(step, _no_16_bits(model, sorted(dtypes)))
    for event in before_training:
        log.event(step, event)


def _no_16_bits(model, dtypes):
    """Returns the event for a model without 16-bit layers."""
    lost, now = lost_policy(), global_policy().name
    if has_set(model):
        lost, why = None, ": apply_policy or PrecisionTuner has set this dtype"
    elif lost:
        why = (
            f": set_global_policy({lost!r}) was called, but "
            "keras.backend.clear_session() or another thread uses "
            f"{now}; call set_global_policy again, right before you build "
            "the model"
        )
    elif is_16_bit(now):
        why = (
            f" although the global policy is {now}: the model was built "
            "before you set the policy, or its layers have their own dtypes; "
            f"call keras_mixprec.apply_policy(model, {now!r})"
        )
    else:
        why = f": the policy is {now}"
    message = f"all layers compute in {', '.join(dtypes)}, none in 16 bits"
    return {
        "kind": "no_16_bits",
        "message": f"{message}{why}",
        "lost": lost is not None,
    }


def log_end(log, step: int):
    """Logs the operations that TensorFlow's graph rewrite converted.

    Args:
        log: The `RunLog`.
        step: Int.
    """
    if rewrite := graph_rewrite.in_force():
        event = {"kind": "graph_rewrite", "message": str(rewrite)}
        log.event(step, event | rewrite.converted)
