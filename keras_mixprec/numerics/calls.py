"""Records the inputs and outputs of layer calls, and the end of failed runs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
from keras import ops, tree

from keras_mixprec.backend import active
from keras_mixprec.keras_internals import (
    flat_layers,
    get_keras_mask,
    get_stateless_scope,
    global_seed_generator,
    logits_of,
    loss_ids,
    seed_generators,
    set_keras_mask,
    set_logits,
    sublayers,
    training_in_force,
)
from keras_mixprec.numerics.arrays import is_float, to_array
from keras_mixprec.numerics.layer_hooks import CallHook, call_name
from keras_mixprec.numerics.random_numbers import Draws
from keras_mixprec.policies.layers import walk_with_model


class LayerCall:
    """One call to one layer.

    Attributes:
        path: String. The layer's path.
        layer: The `keras.layers.Layer`.
        index: Int. The number of earlier calls to the layer in this step.
        run: Function of `args` and `kwargs` that makes the call again.
        args, kwargs: The arguments of the call, before the layer casts them.
        outputs: The outputs of the call.
        losses: List of the losses added by the layer and by layers inside it.
            Empty if the step does not use added losses.
        collects_losses: Boolean, whether the step uses added losses.
        loss_cotangents: List of the gradients of the scaled loss with respect
            to `losses`, or `None` if unknown.
        cotangents: List of the gradients of the scaled loss with respect to
            the tensors in `outputs`, or `None` if there is no gradient.
        input_cotangents: List, the same for the tensors in `(args, kwargs)`.
        training: Boolean or `None`. The value of `training` in the call.
        seeds: List of `(variable, value)`, the random state before the call.
        draws: List of `Draw`, the random numbers that the call drew.
        nested: Boolean, whether the call contains other recorded calls.
        around: List of the `LayerCall`s that contain the call.
        received: Int. The number of output gradients that arrived.
    """

    def __init__(self, path, layer, index, run):
        self.path = path
        self.layer = layer
        self.index = index
        self.run = run
        self.args: Any = None
        self.kwargs: Any = None
        self.outputs: Any = None
        self.losses, self.loss_cotangents = [], []
        self.collects_losses = False
        self.cotangents, self.input_cotangents = [], []
        self.training = None
        self.seeds, self.draws = [], []
        self.nested = False
        self.around = []
        self.received = 0

    @property
    def name(self) -> str:
        """The path, with the number of the call after repeated calls."""
        return call_name(self.path, self.index)

    @property
    def float_outputs(self) -> list:
        """The floating-point tensors in `outputs`, then in `losses`."""
        return [x for x, _ in self._float_pairs()]

    @property
    def float_cotangents(self) -> list:
        """The cotangents of `float_outputs`."""
        return [c for _, c in self._float_pairs()]

    def cotangents_at(self, scale: float) -> list:
        """Returns the cotangents times a loss scale, with 0 for missing ones.

        Args:
            scale: Float. The loss scale. The call must come from a step at loss
                scale 1.
        """
        return [
            to_array(x) * 0.0 if c is None else to_array(c) * scale
            for x, c in self._float_pairs()
        ]

    def tensors(self) -> list:
        """Returns all tensors of the call, and their masks."""
        found = filter(ops.is_tensor, tree.flatten(self._parts(_TENSORS)))
        pairs = [(x, get_keras_mask(x)) for x in found]
        return [x for pair in pairs for x in pair if x is not None]

    def put_values(self, values: dict) -> bool:
        """Replaces the tensors by their values.

        Args:
            values: Dict from the id of each of `tensors()` to its value, or to
                `None` if the value is unknown.

        Returns:
            True if the values of all inputs and outputs are known.
        """

        def value_of(leaf):
            value = values.get(id(leaf), leaf)
            mask = get_keras_mask(leaf)
            if mask is not None:
                set_keras_mask(value, values[id(mask)])
            return value

        needed = tree.flatten(self._parts(_GIVEN_AND_RETURNED))
        if any(values.get(id(leaf), True) is None for leaf in needed):
            return False
        found = tree.map_structure(value_of, self._parts(_TENSORS))
        for name, part in zip(_TENSORS, found, strict=True):
            setattr(self, name, part)
        return True

    def _parts(self, names):
        return [getattr(self, name) for name in names]

    def _float_pairs(self):
        results = [*tree.flatten(self.outputs), *self.losses]
        cotangents = [*self.cotangents, *self.loss_cotangents]
        pairs = zip(results, cotangents, strict=True)
        return [(x, c) for x, c in pairs if is_float(x)]


_GIVEN_AND_RETURNED = ("args", "kwargs", "outputs", "losses")
_TENSORS = (
    *_GIVEN_AND_RETURNED,
    "cotangents",
    "input_cotangents",
    "loss_cotangents",
    "seeds",
)


class CallRecorder:
    """Records the calls to a model's layers, innermost first.

    In a traced step, tensors have values only after the step has run. A call in
    a traced loop or function never gets values, and counts as part of the
    enclosing call.

    Args:
        entries: List of `LayerEntry`, the layers to record.

    Attributes:
        calls: List of the `LayerCall`s that have returned.
        interrupted: List of the `LayerCall`s that were running when a layer
            raised an error, outermost first.
    """

    def __init__(self, entries):
        self.calls = []
        self._open = []
        self.interrupted = []
        self._backend = active.replay()
        self._hook = CallHook(entries, self._record)

    def recording(self):
        """Returns a context within which every call is recorded."""
        return self._hook.hooked()

    def tensors(self) -> list:
        """Returns the tensors of all calls."""
        return [tensor for call in self.calls for tensor in call.tensors()]

    def put_values(self, values: dict):
        """Replaces all tensors by their values, and drops calls without values.

        Args:
            values: Dict, as for `LayerCall.put_values`.
        """
        self.calls = [call for call in self.calls if call.put_values(values)]
        for call in self.calls:
            for outer in call.around:
                outer.nested = True

    def _record(self, run, layer, path, index, args, kwargs):
        call = LayerCall(path, layer, index, run)
        states = [*seed_states(layer), *_global_seed_state()]
        call.seeds = [(v, v.value) for v in states]
        drawn = len(Draws.so_far())
        call.training = training_in_force()
        call.collects_losses = collects_losses()
        (args, kwargs), (call.args, call.kwargs) = self._observe(
            (args, kwargs), call.input_cotangents
        )
        call.around = list(self._open)
        self._open.append(call)
        added_before = added_losses()
        try:
            outputs = run(*args, **kwargs)
        except Exception:
            # The innermost layer catches the error first, and only then is the
            # list of running calls complete.
            self.interrupted = self.interrupted or list(self._open)
            raise
        finally:
            self._open.pop()
        call.draws = Draws.so_far()[drawn:]
        self._observe_losses(call, added_before)
        outputs, call.outputs = self._observe(outputs, call.cotangents, call)
        self.calls.append(call)
        return outputs

    def _observe_losses(self, call, before):
        """Observes the losses that a call has added to the step."""
        known = {id(loss) for loss in before}
        new = [loss for loss in added_losses() if id(loss) not in known]
        if not new:
            return
        seen, call.losses = self._observe(new, call.loss_cotangents)
        instead = {id(a): b for a, b in zip(new, seen, strict=True)}
        scope = get_stateless_scope()
        scope.losses = [instead.get(id(x), x) for x in scope.losses]
        # A layer finds its own losses by the ids of their tensors, so add the
        # ids of the observed tensors.
        for part in flat_layers(call.layer):
            known_ids = loss_ids(part)
            own = [x for x in new if id(x) in known_ids]
            known_ids.update(id(instead[id(x)]) for x in own)

    def _observe(self, structure, cotangents, call=None):
        """Returns the structure for the step, and the one to record."""
        values = tree.flatten(structure)
        cotangents += [None] * len(values)

        def observe(position, leaf):
            if not is_float(leaf):
                return leaf

            def on_value(value):
                values[position] = with_mask(value, leaf)

            def on_cotangent(value):
                cotangents[position] = value
                if call is not None:
                    call.received += 1

            seen = self._backend.observe(leaf, on_value, on_cotangent)
            logits = logits_of(leaf)
            if logits is not None:
                set_logits(seen, logits)
            return with_mask(seen, leaf)

        onward = [observe(*item) for item in enumerate(list(values))]
        return (
            tree.pack_sequence_as(structure, onward),
            tree.pack_sequence_as(structure, values),
        )


def ending_pieces(entries):
    """Returns a context for a run that does not record layer calls.

    JAX compiles a step in pieces. This context ends a piece after each layer,
    so that few pieces change when a layer gets a different dtype.

    Args:
        entries: List of `LayerEntry`, the layers of the model.
    """

    def call(run, layer, path, index, args, kwargs):
        outputs = run(*args, **kwargs)
        for leaf in filter(is_float, tree.flatten(outputs)):
            active.replay().observe(leaf, _ignored, _ignored)
        return outputs

    return CallHook(entries, call).hooked()


def _ignored(value):
    """Keeps no value."""


def seed_states(layer) -> list:
    """Returns the variables of every seed generator in a layer."""
    return [
        generator.state
        for part in flat_layers(layer)
        for generator in seed_generators(part)
    ]


def _global_seed_state():
    """Returns the state of Keras' default generator, if there is one."""
    generator = global_seed_generator()
    return [] if generator is None else [generator.state]


def added_losses() -> list:
    """Returns the losses that layers have added to the step so far."""
    scope = get_stateless_scope()
    return [] if scope is None else list(scope.losses)


def collects_losses() -> bool:
    """Returns whether the step uses the losses that layers add."""
    scope = get_stateless_scope()
    return scope is not None and scope.collect_losses


def with_mask(tensor, like):
    """Returns `tensor` with the Keras mask that `like` carries."""
    mask = get_keras_mask(like)
    if mask is not None:
        set_keras_mask(tensor, mask)
    return tensor


def observe_outputs(layer, outputs, observe):
    """Returns a layer's outputs with its float tensors observed.

    Args:
        layer: The layer. A model with sublayers is skipped, because its last
            layer has shown the same outputs.
        outputs: The outputs of the layer.
        observe: Function of the position of a tensor, the tensor, and whether
            the tensor is an output. Otherwise the tensor holds the logits of
            that output, which receive the gradient. The function returns the
            tensor for the step.
    """
    if isinstance(layer, keras.Model) and sublayers(layer):
        return outputs

    def seen(position, leaf):
        if not is_float(leaf):
            return leaf
        tensor = with_mask(observe(position, leaf, True), leaf)
        logits = logits_of(leaf)
        if logits is not None:
            set_logits(tensor, observe(position, logits, False))
        return tensor

    leaves = [seen(*item) for item in enumerate(tree.flatten(outputs))]
    return tree.pack_sequence_as(outputs, leaves)


class Interrupted(NamedTuple):
    """A run that raised an error.

    Attributes:
        error: The exception.
        calls: List of the `LayerCall`s that returned before.
        open: List of the `LayerCall`s that were running, outermost first. Empty
            if the error came from code outside layers.
    """

    error: Exception
    calls: list[LayerCall]
    open: list[LayerCall]

    def progress(self) -> tuple[int, int]:
        """Returns how far the run got, forward and backward."""
        return len(self.calls), sum(call.received for call in self.calls)


def interruption(model: keras.Model, run: Callable) -> Interrupted | None:
    """Returns where a run of a model raises, or `None` if it does not.

    Args:
        model: The `keras.Model`.
        run: Function without arguments.
    """
    recorder = CallRecorder(walk_with_model(model))
    concrete = active.replay().is_concrete
    try:
        with recorder.recording():
            run()
    except active.replay().REFUSALS as error:
        recorder.put_values(
            {id(x): x if concrete(x) else None for x in recorder.tensors()}
        )
        return Interrupted(error, recorder.calls, recorder.interrupted)
    return None
