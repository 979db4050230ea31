"""Connects monitoring to the layers, optimizers and metrics of a model."""

from keras_mixprec.backend.common import (
    build_optimizer,
    optimizers_of,
    variable_scope,
)
from keras_mixprec.guards.metric_guard import MetricGuard
from keras_mixprec.loss_scaling.ensure import adopt, can_adopt
from keras_mixprec.loss_scaling.optimizer import LossScaleOptimizer
from keras_mixprec.loss_scaling.spikes import skip_spikes
from keras_mixprec.numerics.range_reading import output_dtype
from keras_mixprec.policies.graph import neighbours
from keras_mixprec.policies.layers import walk, walk_with_model
from keras_mixprec.policies.plan import PrecisionPlan
from keras_mixprec.policies.set_policies import rebuild_functions
from keras_mixprec.policies.summary import precision_summary
from keras_mixprec.reporting.schema import FED_BY


class LayerLog:
    """Logs the table of layers at the start and whenever it changes.

    Args:
        model: The `keras.Model`.
        log: The `RunLog`.

    Attributes:
        dtypes: Dict from layer path to output dtype.
    """

    def __init__(self, model, log):
        self.dtypes: dict = {}
        self._model = model
        self._log = log
        self._known = self._last_step = None

    def write(self, step: int):
        """Logs the table if a dtype changed or a layer was built.

        Args:
            step: Int. The number of the next batch.
        """
        # Building a layer changes its weights and FLOPs in the table of layers,
        # so the table is logged again.
        built = [entry.layer.built for entry in walk(self._model)]
        now = PrecisionPlan.from_model(self._model), built
        if now == self._known:
            return
        table = _with_feeders(precision_summary(self._model), self._model)
        # The log holds one table of layers per step, so a second change before
        # the next step is logged with the next step.
        if step != self._last_step:
            self._known, self._last_step = now, step
            self._log.layers(step, table)
        self.dtypes = {e.path: output_dtype(e.layer) for e in walk(self._model)}


def _with_feeders(summary, model):
    """Adds the paths of the layers that feed each layer to the rows."""
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


# The metric guard is stored on the model. Stored elsewhere, the guard would
# keep the model alive, because the guard refers to the model.
_GUARD_ATTRIBUTE = "_keras_mixprec_guard"


def watch_optimizers(model) -> dict:
    """Returns each `LossScaleOptimizer` of a model, by attribute name.

    The `LossScaleOptimizer` of this package replaces Keras' own and shares its
    state. A user's subclass of Keras' optimizer stays in the model, and is not
    returned. If the model computes in 16 bits, a guard protects its metrics
    from skipped batches.

    Args:
        model: A compiled `keras.Model`. A single optimizer has the name `""`.
    """
    with variable_scope(model):
        return _watch(model)


def watch_spikes(model):
    """Skips steps with a gradient spike, until the guard stops.

    Args:
        model: A compiled `keras.Model`, after `watch_optimizers`.
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
        # Build the optimizer only if the model has a single one. With several
        # optimizers, only the `train_step` knows which variables each optimizer
        # trains.
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
    """Returns whether the model has created its trainable variables."""
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
