"""Measures the ranges of all layers on one batch, without taking a step."""

import contextlib
from typing import NamedTuple

import keras
import numpy as np
from keras import ops

from keras_mixprec._checks import raise_if_strict
from keras_mixprec._patched import patched
from keras_mixprec.backend import active
from keras_mixprec.backend.common import (
    all_variables,
    optimizers_of,
)
from keras_mixprec.formats import Format, get_format
from keras_mixprec.keras_internals import (
    has_replicas,
    holding,
    innermost,
    learning_rate_object,
    micro_batches,
    own_trainable,
    stored_value,
    updated_variables,
)
from keras_mixprec.numerics.arrays import to_array
from keras_mixprec.numerics.attention_logits import logits_hook
from keras_mixprec.numerics.calls import observe_outputs
from keras_mixprec.numerics.dry_step import restored, run_held
from keras_mixprec.numerics.layer_hooks import names_of_output
from keras_mixprec.numerics.statistics import (
    Statistics,
    measure,
    statistics_of,
)
from keras_mixprec.policies.layers import walk
from keras_mixprec.policies.rescaled import rescaling_of


class LayerReading(NamedTuple):
    """The measurements of one layer call.

    Attributes:
        path: String. The layer's path, with the suffix `#k` for a call after
            `k` earlier calls in the same step.
        parts: Dict from a name to its `Statistics`. The names are
            `"activation"` (outputs), `"gradient"` (of the scaled loss, at the
            outputs), `"weight_gradient"` (unscaled), `"weight"` and
            `"attention_logits"`.
        lost_updates: Float. Share of the weights that have a gradient but do
            not change. `None` if the step is skipped or only accumulates
            gradients, if the learning rate is zero, or if the gradients are
            sparse.
    """

    path: str
    parts: dict
    lost_updates: float | None


class Ranges(NamedTuple):
    """The ranges of a model's layers.

    Attributes:
        readings: List of `LayerReading`, in the order of the calls.
        limits: The `Format` that headroom refers to. It is bfloat16 if some
            layers compute in bfloat16 and none in float16, otherwise float16.
        dtypes: Dict from layer path to the dtype of its outputs.
        failures: Dict from the path of a layer, or the name of an optimizer, to
            the reason why it could not be measured.
    """

    readings: list[LayerReading]
    limits: Format
    dtypes: dict
    failures: dict

    @property
    def is_finite(self) -> bool:
        """Returns whether all outputs of layers are finite."""
        parts = [reading.parts.get("activation") for reading in self.readings]
        return not any(part.nonfinite for part in parts if part)


def read_ranges(model: keras.Model, data) -> Ranges:
    """Measures layers, weights and updates in a dry run of the next step.

    The model's own `train_step` runs once with its optimizers held. Then the
    optimizers apply the gradients, to measure lost updates. The model does not
    change, and Keras does not compile the train function again.

    Args:
        model: A built and compiled `keras.Model`, whose variables hold their
            current values.
        data: The batch, as `train_step` takes it.
    """
    with active.processes().single_process(model), restored(model):
        taken = _Taken(model)
        tensors = active.replay().run_once(model, taken.run, data)
    with active.processes().single_process(model):
        return taken.ranges(tensors)


def accumulation_steps(optimizer) -> int:
    """Returns the number of steps whose gradients make one update."""
    return innermost(optimizer).gradient_accumulation_steps or 1


class _Taken:
    """Collects tensors from a step while it runs, traced or not."""

    def __init__(self, model):
        self._model = model
        self._entries = walk(model)
        self._paths = {id(e.layer): e.path for e in self._entries}
        self._found = {}
        self._failures = {}
        self._updating = [
            optimizer
            for optimizer in optimizers_of(model).values()
            if optimizer.built
            and _updates_next(innermost(optimizer))
            # Replicas can only update together, in a strategy's step.
            and not has_replicas(model)
        ]
        # On a GPU, measure tensors on the device, because copying all
        # activations to the host is slower. On a CPU, NumPy is faster.
        self._on_host = active.devices()["kind"] == "cpu"

    def run(self, data):
        """Runs the step, and returns its tensors or their measurements."""
        with self._hook().hooked():
            _, gradients, scales, scaled, _ = run_held(
                self._model, data, _scale
            )
        unscaled = {}
        for position, (path, variable) in enumerate(self._variables()):
            gradient = gradients.get(id(variable))
            if gradient is None:
                continue
            scale = scales.get(id(variable), 1.0) if scaled else 1.0
            (gradient,) = active.step().unscale([gradient], 1 / scale, [False])
            unscaled[id(variable)] = path, gradient
            rows = gradient.values if _is_sparse(gradient) else gradient
            self._take([path], "weight_gradient", position, rows)
        for optimizer in self._updating:
            with self._noting_failure(optimizer.name):
                self._update(optimizer, unscaled)
        return list(self._found.values())

    def ranges(self, tensors) -> Ranges:
        """Returns the ranges from the tensors that `run` returned."""
        found = dict(zip(self._found, tensors, strict=True))
        for position, (path, variable) in enumerate(self._variables()):
            value = self._measured(ops.stop_gradient(variable.value))
            found[path, "weight", position] = value
        parts, updates = {}, {}
        for (path, part, _), tensor in found.items():
            of_layer = parts.setdefault(path, {})
            if tensor is None:
                reason = "it runs inside a loop or a traced function"
                self._failures[path] = reason
            elif part == "updates":
                updates[path] = updates.get(path, 0) + to_array(tensor)
            else:
                with self._noting_failure(path):
                    measured = self._read(tensor)
                    of_layer.setdefault(part, []).append(measured)
        parts = {
            path: {n: Statistics.together(each) for n, each in own.items()}
            for path, own in parts.items()
        }
        if any(
            own["weight_gradient"].nonfinite
            for own in parts.values()
            if "weight_gradient" in own
        ):
            updates = {}  # A skipped step has no updates.
        layers = [entry.layer for entry in self._entries]
        return Ranges(
            [LayerReading(p, parts[p], _lost(updates.get(p))) for p in parts],
            _limits_of(layers),
            {self._paths[id(x)]: output_dtype(x) for x in layers},
            self._failures,
        )

    def _hook(self):
        def put(name, position, tensor):
            self._take([name], "attention_logits", position, tensor)

        return logits_hook(self._entries, self._on_call, put)

    def _on_call(self, run, layer, path, index, args, kwargs):
        names = names_of_output(self._paths, layer, index)

        def observe(position, leaf, is_output):
            backend = active.replay()
            if is_output:
                value = ops.stop_gradient(leaf)
                self._take(names, "activation", position, value)

            def on_cotangent(gradient):
                # The gradient at the logits counts only if the output has no
                # gradient.
                if (names[0], "gradient", position) not in self._found:
                    self._take(names, "gradient", position, gradient)

            return backend.observe(leaf, lambda _: None, on_cotangent)

        return observe_outputs(layer, run(*args, **kwargs), observe)

    def _take(self, names, part, position, tensor):
        measured = self._measured(tensor)
        for name in names:
            self._found[name, part, position] = measured

    def _measured(self, tensor):
        return tensor if self._on_host else measure(tensor)

    def _read(self, tensor):
        array = np.asarray(ops.convert_to_numpy(tensor))
        if self._on_host:
            return statistics_of(array)
        return Statistics.from_row(array)

    def _update(self, optimizer, unscaled):
        """Lets an optimizer update, and counts the weights that it changes."""
        variables = updated_variables(optimizer)
        variables = [v for v in variables if id(v) in unscaled]
        gradients = [unscaled[id(v)][1] for v in variables]
        before = [ops.copy(v.value) for v in variables]
        inner, held = innermost(optimizer), all_variables(self._model)
        with (
            holding(held, [stored_value(v) for v in held]),
            patched(inner, {"loss_scale_factor": None}),
        ):
            inner.apply(gradients, variables)
            after = [ops.convert_to_tensor(v.value) for v in variables]
        for position, variable in enumerate(variables):
            path, gradient = unscaled[id(variable)]
            # Skip sparse gradients, which cover only some rows, and gradients
            # that replace their variable.
            if not _is_sparse(gradient) and not getattr(
                variable, "overwrite_with_gradient", False
            ):
                moving = ops.not_equal(gradient, 0)
                moved = ops.not_equal(before[position], after[position])
                moved = ops.logical_and(moving, moved)
                counts = [
                    ops.sum(ops.cast(x, "int32")) for x in (moved, moving)
                ]
                self._found[path, "updates", position] = ops.stack(counts)

    @contextlib.contextmanager
    def _noting_failure(self, path):
        # If one layer fails, still measure the other layers.
        try:
            yield
        except Exception as error:
            raise_if_strict(error)
            reason = f"{type(error).__name__}: {error}"
            self._failures.setdefault(path, reason)

    def _variables(self):
        for entry in self._entries:
            for variable in own_trainable(entry.layer):
                yield entry.path, variable


def _is_sparse(gradient):
    return active.step().is_sparse(gradient)


def _lost(counts):
    """Returns the share of weights with a gradient that do not change."""
    if counts is None or not counts[1]:
        return None
    return 1 - float(counts[0]) / float(counts[1])


def _limits_of(layers):
    dtypes = {layer.compute_dtype for layer in layers}
    only_bfloat16 = "bfloat16" in dtypes and "float16" not in dtypes
    return get_format("bfloat16" if only_bfloat16 else "float16")


def output_dtype(layer) -> str:
    """Returns the dtype of a layer's outputs."""
    own = rescaling_of(layer)
    return layer.compute_dtype if own is None else own.output_dtype


def _updates_next(optimizer):
    """Returns whether the optimizer's next step is meant to change weights."""
    steps = micro_batches(optimizer)
    if (int(to_array(steps)) + 1) % accumulation_steps(optimizer):
        return False
    rate = learning_rate_object(optimizer)
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        rate = rate(steps)
    # Do not call a learning rate that is a function, because the function may
    # have side effects. A `MultiOptimizer` has no single learning rate.
    has_rate = hasattr(optimizer, "learning_rate") and not callable(rate)
    return not has_rate or float(to_array(rate)) != 0


def _scale(optimizer):
    # If training uses a different optimizer, the optimizer from `compile` is
    # never built, and scales nothing.
    if not optimizer.built:
        return 1.0
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return ops.convert_to_tensor(optimizer.dynamic_scale)
    return optimizer.loss_scale_factor or 1.0
