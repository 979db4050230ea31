"""Attaching to a model in `fit`, its optimizers and metrics, and detaching."""

from collections import Counter

import keras

from keras_mixprec.backend import active
from keras_mixprec.backend.common import (
    build_optimizer,
    optimizers_of,
    variable_scope,
)
from keras_mixprec.guards.metric_guard import MetricGuard
from keras_mixprec.loss_scaling.ensure import adopt, can_adopt
from keras_mixprec.loss_scaling.optimizer import LossScaleOptimizer
from keras_mixprec.loss_scaling.spikes import gates_of, skip_spikes
from keras_mixprec.monitoring.range_reading import output_dtype
from keras_mixprec.numerics.arrays import to_array
from keras_mixprec.policies import matmul_precision
from keras_mixprec.policies.graph import neighbours
from keras_mixprec.policies.layers import walk, walk_with_model
from keras_mixprec.policies.plan import PrecisionPlan
from keras_mixprec.policies.set_policies import rebuild_functions
from keras_mixprec.policies.summary import precision_summary
from keras_mixprec.reporting.schema import FED_BY, RANGES, SPEED

# What the Custom Scalars tab draws together; tags as regular expressions.
CHARTS = {
    "Mixed precision": {
        "loss scale (log2)": [r"mixprec/log2_loss_scale.*"],
        "skipped steps": [r"mixprec/skipped_steps.*"],
        "least headroom (bits)": [rf"{RANGES}/\w+_headroom_bits"],
        "shares lost in 16 bits": [
            rf"{RANGES}/gradient_subnormal",
            rf"{RANGES}/weight_gradient_below",
            rf"{RANGES}/lost_updates",
        ],
        "layers with infinities or NaNs": [rf"{RANGES}/nonfinite_layers"],
        "step time (s)": [rf"{SPEED}/step_time.*"],
        "samples a second": [rf"{SPEED}/samples_per_second"],
        "shares of the time": [rf"{SPEED}/(input|overhead)_share"],
        "gradient norm": [r"mixprec/gradient_norm(/\w+)?$"],
    }
}

# What distinguishes runs in the HParams tab, and what its table has of each:
# without a list it takes every curve for a metric.
SETTINGS = {
    "policy": str,
    "optimizer": str,
    "learning_rate": float,
    "loss_scale": str,
    "first_loss_scale": float,
    "matmul_precision": str,
}
METRICS = {
    "mixprec/loss_scale": "loss scale",
    "mixprec/skipped_steps": "skipped steps",
    f"{RANGES}/activation_headroom_bits": "headroom of activations (bits)",
    f"{RANGES}/gradient_headroom_bits": "headroom of gradients (bits)",
    f"{RANGES}/lost_updates": "lost updates",
    f"{SPEED}/step_time_median": "step time (s)",
    f"{SPEED}/samples_per_second": "samples a second",
    f"{SPEED}/peak_memory": "peak memory (bytes)",
}


def settings_of(model: keras.Model) -> dict:
    """Returns what distinguishes one run from another in the HParams tab.

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
        # That of a schedule is the one it begins with.
        # A `MultiOptimizer` has several.
        if (rate := getattr(optimizer, "learning_rate", None)) is not None:
            settings["learning_rate"] = float(to_array(rate))
    return settings


class LayerLog:
    """Logs the table of a model's layers at the start and on each change.

    Args:
        model: The `keras.Model`.
        log: The `RunLog`.

    Attributes:
        dtypes: Dict from paths to the dtypes of outputs.
    """

    def __init__(self, model, log):
        self.dtypes: dict = {}
        self._model = model
        self._log = log
        self._known = self._last_step = None

    def write(self, step: int):
        """Logs the table if dtypes, or which layers are built, have changed.

        Args:
            step: Int. The number of the next batch.
        """
        # What is not built yet has no weights and no FLOPs.
        built = [entry.layer.built for entry in walk(self._model)]
        now = PrecisionPlan.from_model(self._model), built
        if now == self._known:
            return
        table = _with_feeders(precision_summary(self._model), self._model)
        # With what has changed since the last step none was taken.
        if step != self._last_step:
            self._known, self._last_step = now, step
            self._log.layers(step, table)
        self.dtypes = {e.path: output_dtype(e.layer) for e in walk(self._model)}


def _with_feeders(summary, model):
    """Rows of layers with the paths of those that feed each, in a graph."""
    paths = {id(entry.layer): entry.path for entry in walk(model)}
    feeders: dict = {path: [] for path in paths.values()}
    around = neighbours(model)
    for layer, (before, _) in around.items():
        if layer in paths:
            known = [paths[id(b)] for b in before if id(b) in paths]
            feeders[paths[layer]] = list(dict.fromkeys(known))
    if not around:
        return summary.to_list()
    return [row | {FED_BY: feeders[row["path"]]} for row in summary.to_list()]


# The attribute of a model that holds the guard of its metrics, which refers to
# the model: kept anywhere else it would keep that alive.
_GUARD_ATTRIBUTE = "_keras_mixprec_guard"


def watch_optimizers(model) -> dict:
    """Returns each `LossScaleOptimizer` of a model, by attribute name.

    Keras' own is exchanged for one that shares its state. A user's subclass of
    it is left alone, and not returned. The metrics of a model that computes in
    16 bits are guarded against the batches that are skipped, until
    `stop_watching`.

    Args:
        model: A compiled `keras.Model`. The name of its only optimizer is
            `""`.
    """
    with variable_scope(model):
        return _watch(model)


def keep_watching(model):
    """Guards the train function again if it was recompiled meanwhile."""
    guard_of(model).keep()


def watch_spikes(model):
    """Skips steps whose gradients are a spike, until `stop_watching`.

    Args:
        model: A compiled `keras.Model` that is watched.
    """
    build_optimizer(model)
    with variable_scope(model):
        if skip_spikes(model):
            rebuild_functions(model)
        guard = guard_of(model)
        if guard.on:
            guard.keep()
        else:
            guard.start()


def stop_watching(model):
    """Leaves the model as it is without being watched."""
    guard_of(model).stop()
    for gate in gates_of(model):
        gate.stop()


def guard_of(model) -> MetricGuard:
    """Returns the guard of the model's metrics."""
    if _GUARD_ATTRIBUTE not in vars(model):
        vars(model)[_GUARD_ATTRIBUTE] = MetricGuard(model)
    return vars(model)[_GUARD_ATTRIBUTE]


def _watch(model):
    every = {
        name: optimizer
        for name, optimizer in vars(model).items()
        if isinstance(optimizer, LossScaleOptimizer) or can_adopt(optimizer)
    }
    found = {n: o for n, o in optimizers_of(model).items() if n in every}
    for name, optimizer in found.items():
        # Which variables others are for only the model's `train_step` knows.
        if name == "optimizer" and not optimizer.built and _knows_all(model):
            optimizer.build(model.trainable_variables)
        found[name] = adopt(optimizer)
        if found[name] is not optimizer:
            for other in (n for n, o in every.items() if o is optimizer):
                setattr(model, other, found[name])
            if model.train_function is not None:
                model.make_train_function(force=True)
    if found and _computes_in_16_bits(model):
        _guard(model)
    if list(found) == ["optimizer"]:
        return {"": model.optimizer}
    return found


def _knows_all(model):
    """Whether all trainable variables are there, if it has any."""
    layers = (entry.layer for entry in walk_with_model(model))
    return model.trainable_variables or all(layer.built for layer in layers)


def _guard(model):
    guard = guard_of(model)
    if not guard.function.fits:
        guard = MetricGuard(model)
        vars(model)[_GUARD_ATTRIBUTE] = guard
    guard.start()


def _computes_in_16_bits(model):
    dtypes = {e.layer.compute_dtype for e in walk_with_model(model)}
    return not dtypes.isdisjoint({"float16", "bfloat16"})
