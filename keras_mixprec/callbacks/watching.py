"""Getting a model ready to be watched."""

import weakref

import keras

from keras_mixprec.backend.model_state import optimizers_of
from keras_mixprec.backend.variable_scope import variable_scope
from keras_mixprec.callbacks.metric_guard import MetricGuard
from keras_mixprec.callbacks.watch import Watch
from keras_mixprec.loss_scaling.adopt import adopt

# The guard of each model: it stays with the model's metrics.
_GUARDS = weakref.WeakKeyDictionary()


def watch_optimizers(model) -> dict[str, Watch]:
    """Returns a `Watch` of each loss scale optimizer, by attribute name.

    Keras' own is exchanged for one that shares its state, and the metrics are
    guarded against the batches that are skipped.

    Args:
        model: A compiled `keras.Model`. The name of its only optimizer is
            `""`.
    """
    with variable_scope(model):
        return _watch(model)


def guard_of(model) -> MetricGuard:
    """Returns the guard of the model's metrics."""
    return _GUARDS.setdefault(model, MetricGuard())


def _watch(model):
    wrapper = keras.optimizers.LossScaleOptimizer
    every = {n: o for n, o in vars(model).items() if isinstance(o, wrapper)}
    found = {n: o for n, o in optimizers_of(model).items() if n in every}
    changed = False
    for name, optimizer in found.items():
        # Which variables others are for only the model's `train_step` knows.
        weights = model.trainable_variables if name == "optimizer" else []
        if weights and not optimizer.built:
            optimizer.build(weights)
        found[name] = adopt(optimizer)
        if found[name] is not optimizer:
            for other in (n for n, o in every.items() if o is optimizer):
                setattr(model, other, found[name])
            changed = True
    guard = guard_of(model)
    guard.enabled = bool(found)
    if found:
        changed |= guard.guard(model)
    if changed:
        _remake_functions(model)
    if list(found) == ["optimizer"]:
        return {"": Watch(model.optimizer)}
    return {name: Watch(optimizer) for name, optimizer in found.items()}


def _remake_functions(model):
    # Both hold the metrics' variables.
    if getattr(model, "train_function", None) is not None:
        model.make_train_function(force=True)
    if getattr(model, "test_function", None) is not None:
        model.make_test_function(force=True)
