"""Settings of a run that decide on precision, for the log."""

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

# Arguments of the monitor that another run needs to be alike.
_ARGUMENTS = "update_freq", "probe_every", "max_overhead"


def settings_of(model: keras.Model) -> dict:
    """Returns the settings that distinguish runs in the HParams tab.

    Args:
        model: A built and compiled `keras.Model`.

    Returns:
        Dict from some of the names in `SETTINGS` to values.
    """
    policies = Counter(PrecisionPlan.from_model(model).values())
    optimizer = getattr(model, "optimizer", None)
    settings: dict = {"matmul_precision": matmul_precision.in_force().products}
    if policies:
        settings["policy"] = policies.most_common(1)[0][0]
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        # A user's subclass of Keras' own has no rule.
        rule = getattr(optimizer, "rule", optimizer)
        settings["loss_scale"] = type(rule).__name__
        scale = optimizer.initial_scale
        if optimizer.built:
            scale = active.step().read(optimizer.dynamic_scale)
        settings["first_loss_scale"] = float(scale)
        optimizer = optimizer.inner_optimizer
    if optimizer is not None:
        settings["optimizer"] = type(optimizer).__name__
        # A schedule has the rate that it begins with. A `MultiOptimizer` has
        # several.
        if (rate := getattr(optimizer, "learning_rate", None)) is not None:
            settings["learning_rate"] = float(to_array(rate))
    return settings


def log_begin(watch, before_training: Sequence):
    """Logs that a `fit` begins, and the settings in force in it.

    Args:
        watch: The `Watch`.
        before_training: Sequence of dicts, events to log after that.
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
    """Returns the event for a model without 16-bit layers, and why."""
    lost, now = lost_policy(), global_policy().name
    if has_set(model):
        lost, why = None, ": apply_policy or PrecisionTuner has set them so"
    elif lost:
        why = (
            f": set_global_policy({lost!r}) was called before, but the global "
            f"policy is {now} again, as keras.backend.clear_session() makes "
            "it and other threads have it; call set_global_policy after that, "
            "where the model is built"
        )
    elif is_16_bit(now):
        why = (
            f" though the global policy is {now}: the model was built before "
            "that was set, or its layers have dtypes of their own; "
            f"keras_mixprec.apply_policy(model, {now!r}) sets it now"
        )
    else:
        why = f": they follow the policy {now}"
    message = f"no layer computes in 16 bits but all in {', '.join(dtypes)}"
    return {
        "kind": "no_16_bits",
        "message": f"{message}{why}",
        "lost": lost is not None,
    }


def log_end(log, step: int):
    """Logs the operations that TensorFlow's graph rewrite has converted.

    Args:
        log: The `RunLog`.
        step: Int.
    """
    if rewrite := graph_rewrite.in_force():
        event = {"kind": "graph_rewrite", "message": str(rewrite)}
        log.event(step, event | rewrite.converted)
