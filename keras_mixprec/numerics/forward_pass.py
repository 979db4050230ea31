"""Runs `predict`, or any function that calls a model, and records the calls.

The user's own function runs operation by operation, and its loops run in
Python. So the record shows each layer call in a loop with its own numbers.
"""

import contextlib
import hashlib
import inspect
from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np
from keras import ops, tree

from keras_mixprec._patched import function_here, patched_here
from keras_mixprec.backend import active
from keras_mixprec.backend.common import naming_exhaustion
from keras_mixprec.keras_internals import (
    backend_core,
    flat_layers,
    set_value,
    stored_value,
)
from keras_mixprec.numerics.arrays import is_float, to_array
from keras_mixprec.numerics.calls import CallRecorder, LayerCall, ending_pieces
from keras_mixprec.numerics.evaluation import leaving_no_trace
from keras_mixprec.numerics.random_numbers import Draws, exact_run
from keras_mixprec.policies.layers import walk_with_model


class ForwardPass(NamedTuple):
    """The outputs of a model, and the calls to its layers.

    Attributes:
        outputs: List of the float outputs as float32 arrays, flattened.
        calls: List of `LayerCall`, innermost first, in the order they ended.
        draws: List of `Draw`, the random numbers in the order drawn.
        histories: List of strings. For each output, a hash of the integers,
            such as tokens, that the function read before. Empty for `predict`.
    """

    outputs: list[np.ndarray]
    calls: list[LayerCall]
    draws: list = []
    histories: list = []


class Prediction:
    """Runs `predict` on one batch, in the current dtypes of layers.

    The model does not change. Values that its layers assign are dropped.

    Args:
        model: A built `keras.Model`, compiled or not.
        x: One batch of inputs, as tensors.

    Attributes:
        model: As given.
    """

    def __init__(self, model: keras.Model, x):
        self.model = model
        self._batch = keras.utils.pack_x_y_sample_weight(x)

    def run(
        self, *, records: bool = True, drawing: Draws | None = None
    ) -> ForwardPass:
        """Runs the model's `predict_step` in the current dtypes.

        Args:
            records: Boolean, whether to record the calls. The record keeps all
                activations in memory. Defaults to `True`.
            drawing: `Draws` that records the random numbers. Defaults to
                `None`, a new one.
        """
        entries = walk_with_model(self.model)
        recorder = CallRecorder(entries if records else [])
        drawing = drawing or Draws()
        outputs: list = []
        tensors: list = []

        def run(batch):
            with recorder.recording() if records else ending_pieces(entries):
                outputs[:] = _predicted(self.model, batch, drawing)
            tensors[:] = [*outputs, *recorder.tensors()]
            return tensors

        with naming_exhaustion():
            found = active.replay().run_once(self.model, run, self._batch)
        recorder.put_values(dict(zip(map(id, tensors), found, strict=True)))
        arrays = [to_array(value) for value in found[: len(outputs)]]
        return ForwardPass(arrays, recorder.calls, drawing.made)

    def exact(self, *, records: bool = True) -> ForwardPass:
        """Runs `predict_step` in float32, with the same random numbers.

        Args:
            records: As for `run`.
        """
        return exact_run(self.model, self.run, records=records)

    def outputs(self):
        """Returns the structure that `predict_step` returns, as tensors."""
        structure = None

        def run(batch):
            nonlocal structure
            with Draws().active(), keras.StatelessScope():
                structure = active.replay().predict_step(self.model, batch)
            return tree.flatten(structure)

        found = active.replay().run_once(self.model, run, self._batch)
        return tree.pack_sequence_as(structure, found)

    def tensors(self, _=None) -> list:
        """Returns the float outputs, computed operation by operation."""
        return _predicted(self.model, self._batch, Draws())

    def compiled(self) -> ForwardPass:
        """Runs `predict_step` compiled by XLA, without a record of calls."""
        # Create a new function each time. JAX would reuse the trace of a known
        # function even if layers have changed their dtypes.
        with naming_exhaustion():
            found = active.replay().compiled(lambda _: self.tensors())([])
        return ForwardPass([to_array(value) for value in found], [])


def _predicted(model, batch, drawing):
    """Returns the float tensors from `predict_step`."""
    with naming_exhaustion(), drawing.active(), keras.StatelessScope():
        outputs = active.replay().predict_step(model, batch)
    return [x for x in tree.flatten(outputs) if is_float(x)]


class RecordedCalls:
    """Runs a function that calls a model, and records the calls.

    Weights, random state and compiled functions do not change.

    Args:
        model: A `keras.Model`, compiled or not.
        function: Function that calls the model, or some of its layers.
        args: Tuple of the function's arguments.
        kwargs: Dict of its keyword arguments.

    Attributes:
        model: As given.
    """

    def __init__(self, model, function: Callable, args: tuple, kwargs: dict):
        self.model = model
        self._function = function
        self._given = args, kwargs

    def run(
        self, *, records: bool = True, drawing: Draws | None = None
    ) -> ForwardPass:
        """Calls the function with the current dtypes of layers.

        Args:
            records: Boolean, whether to keep the calls. Defaults to `True`.
            drawing: `Draws` that records the random numbers. Defaults to
                `None`, a new one.
        """
        recorder = _Chain(walk_with_model(self.model))
        drawing = drawing or Draws()
        with self._as_before(), recorder.recording(), drawing.active():
            result = self._called()
        if not recorder.calls:
            raise ValueError(
                "`fn` must call the model or some of its layers. Received: "
                f"fn={self._function!r}, which calls no layer of the model "
                f"{self.model.name!r}"
            )
        found = [_array(x) for x in tree.flatten(result)]
        concrete = active.replay().is_concrete
        recorder.put_values(
            {id(x): x if concrete(x) else None for x in recorder.tensors()}
        )
        outputs = recorder.ends()
        outputs += [(a, recorder.history) for a in found if a is not None]
        return ForwardPass(
            [array for array, _ in outputs],
            recorder.calls if records else [],
            drawing.made,
            [history for _, history in outputs],
        )

    def exact(self, *, records: bool = True) -> ForwardPass:
        """Calls the function in float32, with the same random numbers.

        Args:
            records: As for `run`.
        """
        return exact_run(self.model, self.run, records=records)

    def tensors(self, _=None):
        """Calls the function without a record."""
        with self._as_before():
            self._called()

    def _called(self):
        # Copy the containers of the arguments, because the function may change
        # the containers.
        args, kwargs = tree.map_structure(lambda x: x, self._given)
        with naming_exhaustion():
            result = self._function(*args, **kwargs)
        return list(result) if inspect.isgenerator(result) else result

    @contextlib.contextmanager
    def _as_before(self):
        with (
            naming_exhaustion(),
            leaving_no_trace(self.model),
            _same_functions(self.model),
            _same_seeds(),
            step_by_step(),
        ):
            yield


class _Chain(CallRecorder):
    """Records calls, and finds the results that no other layer call uses.

    The function itself may use such results, for example to sample tokens from
    logits. The history of a call is a hash of all integers, such as tokens,
    that the layers have received. Runs with different histories cannot be
    compared.
    """

    def __init__(self, entries):
        super().__init__(entries)
        self._made = {}
        self._ends = {}
        self._history = hashlib.sha256()

    @property
    def history(self) -> str:
        return self._history.hexdigest()

    def ends(self) -> list:
        """Returns the unused float outputs of calls, with their histories."""
        known = {id(call) for call in self.calls}
        return [
            (to_array(output), history)
            for call, history in self._ends.values()
            if id(call) in known
            for output in call.float_outputs
        ]

    def _record(self, run, layer, path, index, args, kwargs):
        outermost = not self._open
        if not outermost:
            return super()._record(run, layer, path, index, args, kwargs)
        for leaf in tree.flatten((args, kwargs)):
            if id(leaf) in self._made:
                self._ends.pop(id(self._made[id(leaf)][1]), None)
            elif ops.is_tensor(leaf) and active.replay().is_concrete(leaf):
                self._add_to_history(leaf)
        outputs = super()._record(run, layer, path, index, args, kwargs)
        call = self.calls[-1]
        # Keep the output tensors alive, so that Python does not reuse their
        # ids.
        self._made |= {id(x): (x, call) for x in tree.flatten(outputs)}
        self._ends[id(call)] = call, self.history
        return outputs

    def _add_to_history(self, leaf):
        if not is_float(leaf):
            self._history.update(ops.convert_to_numpy(leaf).tobytes())


def _array(leaf):
    """Returns a float result as an array, or `None` for other results."""
    if isinstance(leaf, np.ndarray | np.generic):
        leaf = ops.convert_to_tensor(leaf) if leaf.dtype.kind in "fV" else None
    known = is_float(leaf) and active.replay().is_concrete(leaf)
    return to_array(leaf) if known else None


@contextlib.contextmanager
def _same_functions(model):
    """Context manager that restores a model's compiled functions."""
    before = [
        (layer, name, value)
        for layer in flat_layers(model)
        for name, value in vars(layer).items()
        if name.endswith("_function")
    ]
    try:
        yield
    finally:
        for layer, name, value in before:
            setattr(layer, name, value)


@contextlib.contextmanager
def _same_seeds():
    """Context manager that restores all random seeds, also of samplers."""
    own = function_here(keras.random.SeedGenerator, "next")
    before = {}

    def next_seed(generator, *args, **kwargs):
        state = generator.state
        if id(state) not in before:
            value = ops.convert_to_numpy(stored_value(state))
            before[id(state)] = state, np.array(value)
        return own(generator, *args, **kwargs)

    try:
        with patched_here(keras.random.SeedGenerator, {"next": next_seed}):
            yield
    finally:
        for state, value in before.values():
            set_value(state, ops.convert_to_tensor(value, state.dtype))


@contextlib.contextmanager
def step_by_step():
    """Context manager that compiles nothing, and runs loops in Python.

    `while_loop`, `fori_loop` and `cond` run in Python if nothing is compiled.
    `map`, `vectorized_map` and `scan` do not, so this context replaces them.
    """
    instead = {"map": _map, "vectorized_map": _map, "scan": _scan}
    with active.replay().step_by_step(), patched_here(backend_core, instead):
        yield


def _map(function, elements):
    count = len(tree.flatten(elements)[0])
    return _stacked([function(_at(elements, i)) for i in range(count)])


def _scan(f, init, xs=None, length=None, reverse=False, unroll=1):
    count = length if xs is None else len(tree.flatten(xs)[0])
    places = range(count)[::-1] if reverse else range(count)
    carry, results = init, {}
    for place in places:
        x = None if xs is None else _at(xs, place)
        carry, results[place] = f(carry, x)
    return carry, _stacked([results[place] for place in range(count)])


def _at(elements, place):
    return tree.map_structure(lambda leaf: leaf[place], elements)


def _stacked(results):
    def stack(*leaves):
        return None if leaves[0] is None else ops.stack(leaves)

    return tree.map_structure(stack, *results) if results else None
