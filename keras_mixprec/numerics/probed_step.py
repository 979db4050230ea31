"""The train step with a measurement of every tensor in it."""

import contextlib
import functools
import operator
import threading
from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np

from keras_mixprec._patched import patched
from keras_mixprec.backend import active
from keras_mixprec.backend.common import optimizers_of
from keras_mixprec.formats import Format, get_format
from keras_mixprec.keras_internals import own_trainable, updated_variables
from keras_mixprec.numerics.calls import observe_outputs
from keras_mixprec.numerics.collector import Collector, Update
from keras_mixprec.numerics.held_optimizers import instead_of_optimizers
from keras_mixprec.numerics.layer_hooks import names_of_output
from keras_mixprec.numerics.statistics import Statistics
from keras_mixprec.policies.layers import STAND_IN, walk


class LayerReading(NamedTuple):
    """What a probed step measured of one layer call.

    Attributes:
        path: String. The layer's path, with `#k` behind it for the call after
            `k` others in the same step.
        parts: Dict from `"activation"` (outputs), `"gradient"` (of the scaled
            loss, at the outputs), `"weight_gradient"` (as the optimizer is
            given it), `"weight"` (after the step) or `"attention_logits"` to
            its `Statistics`.
        lost_updates: Float. Share of the weights with a gradient that the
            step left as they were, or `None` if it was not to change them: a
            skipped step, one that only accumulates gradients, a learning rate
            of zero.
    """

    path: str
    parts: dict
    lost_updates: float | None


class Probe:
    """An instrumented copy of a model's train function.

    It takes the same step: observed tensors are passed on unchanged, and the
    statistics are returned beside the results.

    Args:
        model: A built and compiled `keras.Model`.

    Attributes:
        limits: `Format` that headroom refers to: float16 if any layer
            computes in it or none in 16 bits, bfloat16 otherwise.
        seconds: Float. What a probed step takes longer than a plain one, as
            its user has measured.
        failures: Dict from the path of each layer that could not be measured
            to the reason.
        broken: Exception that the last probed step has met beside the step
            itself, `None` for none.
        updated: Boolean. Whether the last probed step, which may have raised,
            has begun to update: it must not be taken again.
    """

    def __init__(self, model: keras.Model):
        self._model = model
        self.broken: Exception | None = None
        self.updated = False
        self._backend = active.probe()
        self._replay = active.replay()
        self._outlet = self._backend.Outlet()
        self._entries = walk(model)
        self._paths = {id(e.layer): e.path for e in self._entries}
        self._owners = _owners(self._entries)
        self._running = threading.local()
        self._instrumented_function = None
        self.limits = limits_of(self._entries)
        self.seconds = 0.0
        self.failures = {}

    def train_function(self, *args):
        """Takes the place of the model's own."""
        self.broken, self.updated = None, False
        with self._instrumented():
            if self._instrumented_function is None:
                self._instrumented_function = self._make(args)
            return self._outlet.take(self._instrumented_function(*args))

    def read(self) -> list[LayerReading]:
        """Returns what the last probed step measured, in order of calls."""
        emitted = sorted(self._outlet.read(), key=operator.itemgetter(0))
        if not emitted:
            return []
        rows = np.concatenate([row for _, row in emitted])
        places = {}
        groups = [
            places.setdefault((path, part), len(places))
            for (_, path, part, _), _ in emitted
        ]
        found = {}
        measured = Statistics.from_rows(rows, self.limits, groups)
        for (path, part), of_part in zip(places, measured, strict=True):
            found.setdefault(path, {})[part] = of_part
        return [_reading(path, parts) for path, parts in found.items()]

    def _make(self, args):
        model = self._model
        own = model.train_function
        # Functions of their own: JAX would give the copy the trace of the
        # train step that it knows.
        try:
            with self._backend.state_given(model, args):
                model.make_train_function(force=True)
            return model.train_function
        finally:
            model.train_function = own

    @contextlib.contextmanager
    def _instrumented(self):
        """Within the context the model's `train_step` measures."""
        original = self._model.train_step

        # Replicas run it in threads of their own, and take turns.
        def train_step(*args):
            collector = Collector(
                self.limits, self._outlet, args, self.failures
            )
            hook = self._hook(collector)
            self._running.collector = collector
            try:
                with hook.hooked():
                    result = original(*args)
                    with self._measuring():
                        return collector.carry(result)
                    return result
            finally:
                del self._running.collector

        setattr(train_step, STAND_IN, original)
        with contextlib.ExitStack() as stack:
            stack.enter_context(
                patched(self._model, {"train_step": train_step})
            )
            for optimizer in optimizers_of(self._model).values():
                stack.enter_context(self._watched(optimizer))
            if self._runs_eagerly:
                names = "apply", "_check_gradients"
                noted = dict.fromkeys(names, self._note_update)
                stack.enter_context(instead_of_optimizers(noted))
            yield

    @property
    def _runs_eagerly(self):
        eager = keras.backend.backend() != "jax" and self._model.run_eagerly
        return eager or keras.backend.backend() == "torch"

    def _note_update(self, original, *args, **kwargs):
        self.updated = True
        return original(*args, **kwargs)

    @contextlib.contextmanager
    def _measuring(self):
        """Context of what is no part of the step, in one that runs now."""
        try:
            yield
        except Exception as error:
            # While a step is traced nothing is updated yet.
            if not self._runs_eagerly:
                raise
            self.broken = error

    def _hook(self, collector):
        # Not before the first probe: importing the monitor shall be quick.
        from keras_mixprec.numerics.attention_logits import logits_hook

        def put(name, position, tensor):
            collector.put((name, "attention_logits", position), tensor)

        on_call = functools.partial(self._on_call, collector)
        return logits_hook(self._entries, on_call, put)

    def _on_call(self, collector, run, layer, path, index, args, kwargs):
        names = names_of_output(self._paths, layer, index)
        arrived = set()

        def observe(position, leaf, is_output):
            def on_value(x):
                for name in names * is_output:
                    collector.put((name, "activation", position), x)

            def on_cotangent(gradient):
                # That of the logits only if none comes by the output.
                if position not in arrived:
                    arrived.add(position)
                    for name in names:
                        collector.put((name, "gradient", position), gradient)

            return self._replay.observe(leaf, on_value, on_cotangent)

        return observe_outputs(layer, run(*args, **kwargs), observe)

    def _watched(self, optimizer):
        """Context that measures what an optimizer is given, and does."""
        # `apply_together` does not pass through `apply`, but both through this.
        name = "_check_gradients"
        name = name if hasattr(optimizer, name) else "apply"
        original = getattr(optimizer, name)

        def watched(grads, trainable_variables=None):
            grads = list(grads)
            variables = trainable_variables or updated_variables(optimizer)
            update = None
            with self._measuring():
                update = Update(
                    self._running.collector,
                    optimizer,
                    grads,
                    variables,
                    self._owner,
                )
            step = original(grads, trainable_variables)
            if update is None:
                return step
            if name == "_check_gradients":
                return _WatchedStep(step, update, self._measuring)
            with self._measuring():
                update.finish()
            return step

        return patched(optimizer, {name: watched})

    def _owner(self, variable):
        return self._owners.get(id(variable), (variable.path, 0))


class _WatchedStep(NamedTuple):
    """Takes the place of a `CheckedGradients`."""

    step: object
    update: Update
    measuring: Callable

    @property
    def finite(self):
        return self.step.finite

    def commit(self, finite):
        self.step.commit(finite)
        with self.measuring():
            self.update.finish()


def _reading(path, parts):
    updates = parts.pop("updates", None)
    lost = float(updates.zero) if updates and updates.size else None
    return LayerReading(path, parts, lost)


def limits_of(entries) -> Format:
    """Returns the format that the headroom of a model's layers refers to."""
    dtypes = {entry.layer.compute_dtype for entry in entries}
    only_bfloat16 = "bfloat16" in dtypes and "float16" not in dtypes
    return get_format("bfloat16" if only_bfloat16 else "float16")


def _owners(entries):
    """The path and position of every variable, by the layer it belongs to."""
    return {
        id(variable): (entry.path, position)
        for entry in entries
        for position, variable in enumerate(own_trainable(entry.layer))
    }
