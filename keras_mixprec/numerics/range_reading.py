"""The ranges of every layer on one batch, without taking a step."""

from typing import NamedTuple

import keras
import numpy as np
from keras import ops

from keras_mixprec.backend import active
from keras_mixprec.formats import Format
from keras_mixprec.keras_internals import own_trainable
from keras_mixprec.numerics.calls import observe_outputs
from keras_mixprec.numerics.collector import loss_scale
from keras_mixprec.numerics.dry_step import restored, run_held
from keras_mixprec.numerics.layer_hooks import names_of_output
from keras_mixprec.numerics.probed_step import LayerReading, limits_of
from keras_mixprec.numerics.statistics import (
    Statistics,
    measure_exponents,
    statistics_of,
)
from keras_mixprec.policies.layers import walk


class Ranges(NamedTuple):
    """The ranges of a model's layers.

    Attributes:
        readings: List of `LayerReading`, in the order of the calls.
        limits: The `Format` that headroom refers to.
        failures: Dict from the path of each layer that could not be measured
            to the reason.
    """

    readings: list[LayerReading]
    limits: Format
    failures: dict


def read_ranges(model: keras.Model, data) -> Ranges:
    """Measures activations, gradients and weights as a step would meet them.

    The model's own `train_step` runs once with its optimizers held, so that
    nothing is changed and the train function is not compiled again.

    Args:
        model: A built and compiled `keras.Model`, with variables that are up
            to date.
        data: The batch, as `train_step` takes it.
    """
    taken = _Taken(model)
    with active.processes().single_process(model), restored(model):
        tensors = active.replay().run_once(model, taken.run, data)
        return taken.ranges(tensors)


def read_weights(model: keras.Model) -> Ranges:
    """Measures the weights alone, which takes no batch."""
    taken = _Taken(model)
    with active.processes().single_process(model):
        return taken.ranges([])


class _Taken:
    """Takes tensors from a step as it runs, traced or not."""

    def __init__(self, model):
        self._model = model
        self._entries = walk(model)
        self._paths = {id(e.layer): e.path for e in self._entries}
        self._limits = limits_of(self._entries)
        self._found = {}
        # A copy of all activations in the memory of the host takes longer
        # than a few fused reductions on the device; on a CPU the latter do.
        self._on_host = active.devices()["kind"] == "cpu"

    def run(self, data):
        """Runs the step; returns the tensors, or what is measured of them."""
        with self._hook().hooked():
            _, gradients, scales, scaled, _ = run_held(
                self._model, data, _scale
            )
        for position, (path, variable) in enumerate(self._variables()):
            gradient = gradients.get(id(variable))
            if gradient is not None:
                gradient = active.probe().rows(gradient)
                gradient = ops.cast(gradient, "float32")
                if scaled:
                    gradient = gradient / scales.get(id(variable), 1.0)
                self._take([path], "weight_gradient", position, gradient)
        return list(self._found.values())

    def ranges(self, tensors) -> Ranges:
        """Returns the ranges, given the tensors that `run` returned."""
        parts, failures = {}, {}
        for (path, part, _), tensor in zip(self._found, tensors, strict=True):
            of_layer = parts.setdefault(path, {})
            if tensor is None:
                failures[path] = "it runs inside a loop or a traced function"
            else:
                of_layer.setdefault(part, []).append(self._read(tensor))
        for path, variable in self._variables():
            value = self._read(
                self._measured(ops.stop_gradient(variable.value))
            )
            parts.setdefault(path, {}).setdefault("weight", []).append(value)
        readings = [
            LayerReading(
                path,
                {name: Statistics.together(each) for name, each in own.items()},
                lost_updates=None,
            )
            for path, own in parts.items()
        ]
        return Ranges(readings, self._limits, failures)

    def _hook(self):
        # As of a probed step.
        from keras_mixprec.numerics.attention_logits import logits_hook

        def put(name, position, tensor):
            self._take([name], "attention_logits", position, tensor)

        return logits_hook(self._entries, self._on_call, put)

    def _on_call(self, run, layer, path, index, args, kwargs):
        names = names_of_output(self._paths, layer, index)

        def observe(position, leaf, is_output):
            backend = active.replay()
            if is_output:
                value = backend.stop_gradient(leaf)
                self._take(names, "activation", position, value)

            def on_cotangent(gradient):
                # That of the logits only if none comes by the output.
                if (names[0], "gradient", position) not in self._found:
                    self._take(names, "gradient", position, gradient)

            return backend.observe(leaf, lambda _: None, on_cotangent)

        return observe_outputs(layer, run(*args, **kwargs), observe)

    def _take(self, names, part, position, tensor):
        measured = self._measured(tensor)
        for name in names:
            self._found[name, part, position] = measured

    def _measured(self, tensor):
        if self._on_host:
            return tensor
        return measure_exponents(ops.reshape(tensor, (1, -1)))

    def _read(self, tensor):
        array = np.asarray(ops.convert_to_numpy(tensor))
        if self._on_host:
            return statistics_of(array)
        return Statistics.from_rows(array, self._limits)[0]

    def _variables(self):
        for entry in self._entries:
            for variable in own_trainable(entry.layer):
                yield entry.path, variable


def _scale(optimizer):
    # `compile` makes one that training may not use.
    return loss_scale(optimizer) if optimizer.built else 1.0
