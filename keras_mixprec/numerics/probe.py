"""The train step's twin that measures every tensor it passes."""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np
from keras import ops, tree

from keras_mixprec.backend import probe as backend_probe
from keras_mixprec.backend import replay as backend_replay
from keras_mixprec.backend.model_state import optimizers_of
from keras_mixprec.formats import Format, get_format
from keras_mixprec.numerics.arrays import is_float
from keras_mixprec.numerics.calls import with_mask
from keras_mixprec.numerics.hook import CallHook, call_name
from keras_mixprec.numerics.statistics import Statistics, measure
from keras_mixprec.policies.layers import walk


class LayerReading(NamedTuple):
    """What a probed step told of one layer call.

    Attributes:
        path: String. The layer's path, with `#k` behind it for the call after
            `k` others in the same step.
        parts: Dict from `"activation"` (outputs), `"gradient"` (of the scaled
            loss, at the outputs), `"weight_gradient"` (as the optimizer is
            given it) or `"weight"` (after the step) to its `Statistics`.
        lost_updates: Float. Share of the weights with a gradient that the
            step left as they were, or `None`.
    """

    path: str
    parts: dict
    lost_updates: float | None


class Probe:
    """An instrumented twin of a model's train function.

    It takes the same step: an observed tensor flows on as it is, and what is
    told of it leaves the step by the side.

    Args:
        model: A built and compiled `keras.Model`.

    Attributes:
        train_function: To be called in place of the model's own.
        limits: `Format` that headroom refers to: float16 if any layer
            computes in it or none in 16 bits, bfloat16 otherwise.
        seconds: Float. What a probed step takes longer than a plain one, as
            its user has measured.
        failures: Dict from the path of each layer that could not be measured
            to the reason.
    """

    def __init__(self, model: keras.Model):
        self._model = model
        self._backend = backend_probe.current()
        self._replay = backend_replay.current()
        self._slots = self._backend.Slots()
        self._measure = self._backend.traced_once(
            lambda tensor: measure(self._backend.as_held(tensor))
        )
        self._count_lost = self._backend.traced_once(_count_lost)
        self._entries = walk(model)
        self._owners = _owners(self._entries)
        self.limits = limits_of(self._entries)
        self.seconds = 0.0
        self.failures = {}
        self.train_function = self._twin()

    def read(self) -> list[LayerReading]:
        """Returns what the last probed step told, in the order of its calls."""
        found = {}
        for (path, part, _), vectors in self._slots.read().items():
            found.setdefault(path, {}).setdefault(part, []).extend(vectors)
        return [_reading(path, parts) for path, parts in found.items()]

    def _twin(self):
        model = self._model
        own = model.train_function
        # Functions of their own: JAX would give the twin the trace of the
        # train step that it knows.
        with self._instrumented():
            model.make_train_function(force=True)
            twin, model.train_function = model.train_function, own

        def train(*args):
            with self._instrumented():
                return twin(*args)

        return train

    @contextlib.contextmanager
    def _instrumented(self):
        """Within the context the model's `train_step` measures."""
        attributes = vars(self._model)
        before = attributes.get("train_step")
        original = self._model.train_step

        # Replicas run it in threads of their own, and take turns.
        def train_step(*args, **kwargs):
            with CallHook(self._entries, self._on_call).hooked():
                return original(*args, **kwargs)

        attributes["train_step"] = train_step
        try:
            with contextlib.ExitStack() as stack:
                for optimizer in optimizers_of(self._model).values():
                    stack.enter_context(self._watched(optimizer))
                yield
        finally:
            if before is None:
                del attributes["train_step"]
            else:
                attributes["train_step"] = before

    def _on_call(self, run, layer, path, index, args, kwargs):
        outputs = run(*args, **kwargs)
        if isinstance(layer, keras.Model) and layer._layers:
            return outputs  # Its last layer has told of them.
        name = call_name(path, index)

        def observe(position, leaf):
            if not is_float(leaf):
                return leaf
            seen = self._replay.observe(
                leaf,
                lambda x: self._put(name, "activation", position, x),
                lambda g: self._put(name, "gradient", position, g),
            )
            return with_mask(seen, leaf)

        leaves = enumerate(tree.flatten(outputs))
        return tree.pack_sequence_as(outputs, [observe(*x) for x in leaves])

    @contextlib.contextmanager
    def _watched(self, optimizer):
        """Measures what an optimizer is given and what it does with it."""
        # `apply_together` does not pass through `apply`, but both through this.
        name = "_guard" if hasattr(optimizer, "_guard") else "apply"
        original = getattr(optimizer, name)

        def watched(grads, trainable_variables=None):
            grads = list(grads)
            tell_update = self._tell_gradients(
                optimizer, grads, trainable_variables
            )
            step = original(grads, trainable_variables)
            if name == "_guard":
                return _WatchedStep(step, tell_update)
            return tell_update()

        vars(optimizer)[name] = watched
        try:
            yield
        finally:
            del vars(optimizer)[name]

    def _tell_gradients(self, optimizer, grads, trainable_variables):
        """Returns the function that tells what the update did."""
        variables = trainable_variables or optimizer._trainable_variables
        pairs = [
            (variable, self._backend.rows(gradient))
            for gradient, variable in zip(grads, variables, strict=True)
            if gradient is not None
        ]
        before = [ops.copy(v.value) for v, _ in pairs]
        moving = [ops.not_equal(gradient, 0) for _, gradient in pairs]
        inverse = 1.0 / loss_scale(optimizer)
        for variable, gradient in pairs:
            gradient = ops.cast(gradient, "float32") * inverse
            self._put_weight(variable, "weight_gradient", gradient)

        def tell_update():
            for (variable, _), old, mask in zip(
                pairs, before, moving, strict=True
            ):
                new = ops.convert_to_tensor(variable.value)
                self._put_weight(variable, "weight", new)
                self._put_lost_updates(variable, mask, old, new)

        return tell_update

    def _put_weight(self, variable, part, tensor):
        path, position = self._owner(variable)
        self._put(path, part, position, tensor)

    def _put_lost_updates(self, variable, moving, old, new):
        if moving.shape != old.shape:
            return  # A sparse gradient is about some rows only.

        self._tell(
            *self._owner(variable),
            "lost_updates",
            lambda: self._count_lost(moving, old, new),
        )

    def _owner(self, variable):
        return self._owners.get(id(variable), (variable.path, 0))

    def _put(self, path, part, position, tensor):
        self._tell(path, position, part, lambda: self._measure(tensor))

    def _tell(self, path, position, part, vector):
        # Whatever it is that a layer hands on, training must not stop here.
        try:
            self._slots.put((path, part, position), vector())
        except Exception as error:
            self.failures.setdefault(path, f"{type(error).__name__}: {error}")


class _WatchedStep(NamedTuple):
    """Takes the place of a `GuardedStep`."""

    step: object
    tell_update: Callable

    @property
    def finite(self):
        return self.step.finite

    def commit(self, finite):
        self.step.commit(finite)
        self.tell_update()


def _count_lost(moving, old, new):
    """How many elements have a gradient and are as they were; and have one."""
    lost = ops.logical_and(moving, ops.equal(old, new))
    return ops.stack([ops.sum(ops.cast(x, "float32")) for x in (lost, moving)])


def _reading(path, parts):
    counts = np.sum(parts.pop("lost_updates", [(0, 0)]), axis=0)
    return LayerReading(
        path,
        {
            part: Statistics.together([*map(Statistics.from_vector, vectors)])
            for part, vectors in parts.items()
        },
        float(counts[0] / counts[1]) if counts[1] else None,
    )


def loss_scale(optimizer):
    """Returns what an optimizer's gradients are scaled by in this step."""
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer.loss_scale_factor or 1.0
    if getattr(optimizer, "_unscaled", False):
        return 1.0
    return ops.convert_to_tensor(optimizer.dynamic_scale)


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
        for position, variable in enumerate(entry.layer._trainable_variables)
    }
