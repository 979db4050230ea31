"""The diagnosis on demand."""

import keras
import numpy as np
from keras import ops, tree

from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.advice import advice
from keras_mixprec.diagnosis.compare import nonfinite
from keras_mixprec.diagnosis.culprits import Search, low_layers
from keras_mixprec.diagnosis.verdict import Verdict
from keras_mixprec.loss_scaling import FixedLossScale, ScheduledLossScale
from keras_mixprec.numerics.arrays import is_float, to_array
from keras_mixprec.numerics.dry_step import exact_step, optimizers_of
from keras_mixprec.policies.layers import check_model


def diagnose(
    model: keras.Model, x, y=None, sample_weight=None, *, step=None
) -> list[Verdict]:
    """Says what is wrong with the precision of a model on one batch.

    The model's own `train_step` runs a few times with its optimizers held,
    once in float32 and then as it is, while every layer is recorded; and each
    layer that computes in 16 bits runs once more in float32 on the very
    inputs it saw, forward and backward. Layers that are found are demoted for
    the rest of the search, so that those which would cast the repaired result
    back are found too. Nothing is changed in the model.

    Args:
        model: A compiled `keras.Model`.
        x: One batch of inputs, as for `model.train_on_batch`. 32 to 64
            samples are enough unless the fault is in the data.
        y: Its targets. Defaults to `None`.
        sample_weight: Its weights. Defaults to `None`.
        step: Int. The number of the training batch, for the verdicts.
            Defaults to `None`.

    Returns:
        List of `Verdict`, the most important first; empty if all is well.

    Raises:
        TypeError: If `model` is not a model.
        ValueError: If it is not compiled, or the data are no batch for it.

    Example:
    >>> inputs = keras.Input((4,))
    >>> x = keras.layers.UnitNormalization(name="norm")(inputs)
    >>> model = keras.Model(inputs, keras.layers.Dense(1, dtype="float32")(x))
    >>> plan = apply_policy(model, "mixed_float16", rules=[])
    >>> model.compile(LossScaleOptimizer("adam"), loss="mse")
    >>> for v in diagnose(model, np.full((8, 4), 1e-4), np.ones((8, 1))):
    ...     print(v.kind, v.layer, v.direction)
    underflow norm forward
    """
    check_model(model)
    if not getattr(model, "compiled", False):
        raise ValueError(
            "`model` must be compiled, since its loss is part of what is "
            "diagnosed: call `model.compile(...)` first. "
            f"Received: model={model.name!r}"
        )
    data = _to_tensors((x, y, sample_weight))
    compiled = bool(model.jit_compile) and not model.run_eagerly
    # Constants that overflow float16 are what is looked for.
    with np.errstate(all="ignore"):
        _build(model, data)
        return _Verdicts(model, data, compiled, step).find()


def predict_loss_scale(model, x, y=None, sample_weight=None) -> float:
    """Predicts the loss scale at which the gradients of a batch survive.

    The power of two that the gradients of most float16 layers fit, as they
    are in float32: after the adaptive loss scaling of Zhao et al., 2019
    (arXiv 1910.12385).

    Args:
        model: A compiled `keras.Model`.
        x: One batch of inputs, as for `diagnose`.
        y: Its targets. Defaults to `None`.
        sample_weight: Its weights. Defaults to `None`.
    """
    data = _to_tensors((x, y, sample_weight))
    _build(model, data)
    batch = keras.utils.pack_x_y_sample_weight(*data)
    search = Search(model, batch, exact_step(model, batch), compiled=False)
    return 2.0 ** search.predict_scale_bits(_mover(model))


class _Verdicts:
    def __init__(self, model, data, compiled, step):
        self._model = model
        self._data = data
        # As `fit` hands it on: a `train_step` may know of no weights.
        self._batch = keras.utils.pack_x_y_sample_weight(*data)
        self._common = {"compiled": compiled, "step": step}

    def find(self):
        lost = self._lost_weights()
        if lost:
            return [lost]
        entries = low_layers(self._model)
        exact = exact_step(self._model, self._batch)
        if not np.isfinite(exact.loss):
            return [self._not_precision()]
        if not entries:
            return []
        search = Search(
            self._model, self._batch, exact, self._common["compiled"]
        )
        bits, adapts = self._loss_scale()
        search.run(None if adapts else bits, _mover(self._model))
        verdicts = [self._culprit(c, adapts) for c in search.culprits]
        verdicts += self._policy(entries)
        return verdicts or self._scale_search(search.windows, bits)

    def _lost_weights(self):
        lost = [
            v.path
            for v in self._model.weights
            if "float" in v.dtype and nonfinite([to_array(v.value)])
        ]
        if not lost:
            return None
        numbers = {"variables": len(lost), "first": lost[0]}
        return self._verdict("weights_lost", numbers=numbers)

    def _not_precision(self):
        numbers = {}
        for name, part in zip(
            ("x", "y", "sample_weight"), self._data, strict=True
        ):
            for tensor in tree.flatten(part):
                if is_float(tensor):
                    bad = ~np.isfinite(to_array(tensor))
                    rows = bad.reshape(len(bad), -1).any(axis=1)
                    if rows.any():
                        numbers[f"rows_of_{name}"] = np.flatnonzero(rows)[
                            :8
                        ].tolist()
        return self._verdict(
            "bad_data" if numbers else "divergence", numbers=numbers
        )

    def _loss_scale(self):
        """The loss scale as a power of two, and whether it adapts itself."""
        wrapper = keras.optimizers.LossScaleOptimizer
        found = optimizers_of(self._model).values()
        scaling = next((o for o in found if isinstance(o, wrapper)), None)
        if scaling is None:
            return 0.0, False
        rule = getattr(scaling, "rule", None)
        given = isinstance(rule, (FixedLossScale, ScheduledLossScale))
        if not scaling.built:
            return float(np.log2(scaling.initial_scale)), not given
        scale = to_array(scaling.dynamic_scale.value)
        return float(np.log2(scale)), not given

    def _scale_search(self, windows, bits):
        ceiling = min((w.high for w in windows.values()), default=np.inf)
        if bits <= ceiling + thresholds.BITS_ABOVE:
            return []
        numbers = {"loss_scale_bits": bits, "highest_bits": ceiling}
        return [self._verdict("scale_search", numbers=numbers)]

    def _culprit(self, culprit, adapts):
        unscaled = (culprit.kind, culprit.direction) == (
            "underflow",
            "backward",
        )
        return self._verdict(
            culprit.kind,
            culprit.path,
            culprit.direction,
            culprit.numbers,
            unscaled=unscaled and not adapts,
        )

    def _policy(self, entries):
        narrow = [
            e.path for e in entries if e.layer.variable_dtype != "float32"
        ]
        if not narrow:
            return []
        numbers = {"layers": len(narrow), "first": narrow[0]}
        return [self._verdict("policy", None, "update", numbers)]

    def _verdict(self, kind, layer=None, direction=None, numbers=(), **case):
        return Verdict(
            kind,
            layer,
            direction,
            numbers=dict(numbers),
            advice=advice(kind, layer, **case),
            **self._common,
        )


def _to_tensors(data):
    tensors, sizes = [], {}
    for name, part in zip(("x", "y", "sample_weight"), data, strict=True):
        try:
            tensors.append(tree.map_structure(_to_tensor, part))
            for leaf in tree.flatten(tensors[-1]):
                if leaf is not None:
                    sizes[name] = len(leaf)
        except (TypeError, ValueError) as error:
            raise ValueError(_not_a_batch(name, part)) from error
    if not sizes.get("x"):
        raise ValueError(_not_a_batch("x", data[0]))
    if len(set(sizes.values())) > 1:
        raise ValueError(
            "All parts of the batch must have the same number of samples. "
            f"Received: {sizes}"
        )
    return tuple(tensors)


def _to_tensor(leaf):
    if isinstance(leaf, (str, bytes)):
        raise TypeError("A string is no array.")
    return leaf if leaf is None else ops.convert_to_tensor(leaf)


def _not_a_batch(name, part):
    return (
        f"`{name}` must be one batch of at least one sample: an array, or a "
        "list or dict of arrays as `model.train_on_batch` takes them. "
        f"Received: {name}={str(part)[:80]} of type {type(part).__name__}"
    )


def _build(model, data):
    """Builds what the first batch of `fit` would build."""
    model._symbolic_build(data_batch=data)
    optimizer = model.optimizer
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)


def _mover(model):
    """Whether an optimizer would move a variable by its gradient."""
    optimizer = model.optimizer
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    epsilon = getattr(inner, "epsilon", None)

    def moves(variable, gradient):
        size = float(np.abs(gradient).max(initial=0.0))
        if isinstance(epsilon, float):
            return size >= thresholds.SHARE_OF_EPSILON * epsilon
        weight = float(np.abs(to_array(variable.value)).max(initial=0.0))
        rate = float(inner.learning_rate) if inner is not None else 1.0
        return rate * size >= thresholds.SHARE_OF_WEIGHT * weight

    return moves
