"""The operations inside a model's own calls, in its dtypes and in float32."""

import contextlib
import difflib
import inspect
import itertools
import math
from typing import NamedTuple

import keras
import numpy as np
from keras import ops, tree

from keras_mixprec._patched import patched_here
from keras_mixprec.backend import active
from keras_mixprec.backend.common import optimizers_of
from keras_mixprec.backend.operations import (
    VANISHING,
    Operation,
    Range,
    Traced,
)
from keras_mixprec.keras_internals import (
    backend_random,
    flat_layers,
    functional_of,
    inputs_of,
    loss_ids,
)
from keras_mixprec.numerics.call_key import call_key
from keras_mixprec.numerics.held_optimizers import instead_of_optimizers
from keras_mixprec.numerics.layer_hooks import (
    CallHook,
    call_name,
    in_float32,
    with_sublayers,
)
from keras_mixprec.policies.layers import (
    has_own_loss,
    has_own_step,
    walk_with_model,
)

# What stands for sizes that are not known: of samples the first at which the
# model runs, since positions that are learned or tabulated come to an end.
_BATCH, _LENGTHS = 32, (64, 32, 16, 8)

# A model is run on as many samples as have so many numbers, at most 512.
_NUMBERS, _SAMPLES = 2**20, 512


class ModelTrace(NamedTuple):
    """What a model's own calls compute.

    Attributes:
        operations: List of `Operation`, in the model's dtypes. Each `Value`
            that the float32 trace has as well refers to it, and that to the
            `Range` of its numbers if there are data. The scope is the path of
            the innermost layer, and which call of it.
        error: The exception that its dtypes raise and float32 does not.
        untraced: The exception that a call in float32 raises as well, so that
            little or nothing is known.
    """

    operations: list[Operation]
    error: Exception | None = None
    untraced: Exception | None = None


def path_of(operation: Operation) -> str:
    """Returns the path of the layer that an operation is of."""
    return operation.scope.partition("#")[0]


def trace_model(model: keras.Model, x=None, y=None) -> ModelTrace:
    """Traces a call in training, in the model's own dtypes and in float32.

    Variables, losses, metrics and random state are as before afterwards, and
    nothing is computed without `x`. With `y`, a `compute_loss` or `train_step`
    of the user's own is traced too, up to where it scales the loss.

    Args:
        model: A built `keras.Model`.
        x: Samples as for `fit`, or `None`. The first of them, 512 if these have
            at most a million numbers, are run through the model in float32,
            for the ranges of all numbers.
        y: Their targets, or `None`.
    """
    found = []
    for length in _LENGTHS:
        call = _Call(model, x, y, length)
        if call.inputs is None:
            return ModelTrace([], untraced=_not_built(model))
        found.append(_traced(call, model, x))
        if found[-1].untraced is None:
            return found[-1]
        if not call.is_of_any_length:
            break
    return found[0]


def _traced(call, model, x):
    own = call.trace(runs=False)
    with in_float32(model):
        reference = call.trace(runs=x is not None)
    if reference.error is not None:  # Not of its precision.
        return ModelTrace(own.operations, untraced=reference.error)
    if x is not None:
        given = reference.inputs[1 + len(call.variables) :]
        for value, array in zip(given, call.inputs, strict=False):
            value.range = range_of(array)
    for value, exact in zip(own.inputs, reference.inputs, strict=False):
        value.reference = exact
    _align(own.operations, reference.operations)
    return ModelTrace(own.operations, own.error)


def is_built(model: keras.Model) -> bool:
    """Returns whether a model and every layer in it is built.

    `build(input_shape)` of a subclassed model builds no layer in it.
    """
    return model.built and all(layer.built for layer in with_sublayers(model))


def _not_built(model):
    return ValueError(
        f"The model {model.name!r} is not built: its operations are traced "
        "when it is, or when samples are given. Received: x=None"
    )


class _Call:
    """One call of a model, with its variables as inputs."""

    def __init__(self, model, x, y, length):
        self._model = model
        self.is_of_any_length = False
        given = None
        if x is None:
            shapes = _inputs(model) if is_built(model) else None
            if shapes is not None:
                leaves = tree.flatten(shapes)
                self.is_of_any_length = any(None in t.shape[1:] for t in leaves)
                given = tree.map_structure(lambda t: _sized(t, length), shapes)
        else:
            count = _count(x)
            given = _first(x, count)
        # Targets alone are of no use.
        data = () if x is None or y is None else (_first(y, count),)
        self._structure = given, *data
        self.inputs = None if given is None else tree.flatten(self._structure)
        self.variables = [v for v in model.variables if "float" in v.dtype]

    def trace(self, runs: bool) -> Traced:
        tensors = [v.value for v in self.variables] if runs else self.variables
        noise = keras.KerasTensor((), "float32")
        if runs:
            noise = ops.zeros((), "float32")
        given = [noise, *tensors, *self.inputs]
        if not runs:
            given = [keras.KerasTensor(g.shape, _dtype(g)) for g in given]
        layers = flat_layers(self._model)
        before = [set(loss_ids(layer)) for layer in layers]
        try:
            # Constants that do not fit are what is looked for.
            with np.errstate(all="ignore"):
                return active.trace().operations(
                    lambda given: self._run(given, runs), given, runs
                )
        finally:
            for layer, ids in zip(layers, before, strict=True):
                loss_ids(layer).clear()
                loss_ids(layer).update(ids)

    def _run(self, given, runs):
        noise, rest = given[0], given[1:]
        count = len(self.variables)
        mapping = zip(self.variables, rest[:count], strict=True)
        x, *y = tree.pack_sequence_as(self._structure, rest[count:])
        model = self._model
        scope = keras.StatelessScope([*mapping], collect_losses=True)
        visit = _recorded(scope, repeats=not runs)
        hook = CallHook(walk_with_model(model), visit)
        drawing = contextlib.nullcontext() if runs else _noise(noise)
        with scope, drawing, hook.hooked():
            if y and has_own_step(model) and optimizers_of(model):
                _run_own_step(model, (x, *y))
                return
            outputs = _called_as_in_fit(model, x)
            if y and has_own_loss(model):
                model.compute_loss(x, *y, outputs, training=True)


def _called_as_in_fit(model, x):
    if keras.backend.backend() != "jax":
        return model(x, training=True)
    # Of the model itself `fit` on JAX runs `call`, which casts no inputs.
    takes = inspect.signature(model.call).parameters
    return model.call(x, **({"training": True} if "training" in takes else {}))


class _Scaled(Exception):
    """The loss is known, and with it the forward pass ends."""


def _run_own_step(model, data):
    def stop(*args, **kwargs):
        raise _Scaled

    names = ("scale_loss", "stateless_scale_loss", "apply", "stateless_apply")
    with (
        contextlib.suppress(_Scaled),
        instead_of_optimizers(dict.fromkeys(names, stop)),
        active.trace().without_gradients(),
    ):
        model.reset_metrics()
        active.replay().train_step(model, data)


def _recorded(scope, repeats):
    """What is called in place of each layer.

    Args:
        scope: The `StatelessScope` with the values of variables.
        repeats: Boolean. Whether the operations of a call may be those of an
            equal one, without numbers of their own.
    """

    def visit(run, layer, path, index, args, kwargs):
        key, given = None, []
        # A second call may read what the first has assigned.
        if repeats and not index:
            key = call_key(layer, args, kwargs)
        if key is not None:
            given = [*filter(ops.is_tensor, tree.flatten((args, kwargs)))]
            given += map(scope.get_current_value, layer.variables)
        return active.trace().call(
            lambda: run(*args, **kwargs), call_name(path, index), key, given
        )

    return visit


def _first(data, count):
    def tensor(array):
        return ops.convert_to_tensor(array[:count])

    return tree.map_structure(tensor, data)


def _count(x):
    numbers = sum(math.prod(array.shape[1:]) for array in tree.flatten(x))
    return max(8, min(_SAMPLES, _NUMBERS // max(1, numbers)))


def _inputs(model):
    """`KerasTensor`s like what a model is called with, `None` if unknown."""
    functional = functional_of(model)
    if functional is not None:
        return inputs_of(functional)
    shapes = (model.get_build_config() or {}).get("input_shape")
    if not isinstance(shapes, (list, tuple)) or not all(
        n is None or isinstance(n, int) for n in shapes
    ):
        return None
    return keras.KerasTensor(shapes, "float32")


def _sized(tensor, length):
    batch, *rest = tensor.shape
    shape = [batch or _BATCH, *(n or length for n in rest)]
    return keras.KerasTensor(shape, tensor.dtype)


def _dtype(tensor):
    return keras.backend.standardize_dtype(tensor.dtype)


@contextlib.contextmanager
def _noise(noise):
    """Random numbers are unknown numbers of the right shape and sign."""

    def numbers(shape, dtype, sign):
        # Of the input, so that they are no constants.
        dtype = dtype or keras.backend.floatx()
        return ops.cast(ops.broadcast_to(sign(noise), shape), dtype)

    def normal(shape, *args, dtype=None, **kwargs):
        return numbers(shape, dtype, lambda n: n)

    def uniform(shape, minval=0.0, maxval=1.0, dtype=None, seed=None):
        if "int" in str(dtype):
            return ops.full(shape, minval, dtype)
        sign = ops.sigmoid if minval >= 0 else ops.tanh
        return numbers(shape, dtype, sign)

    def randint(shape, minval, maxval, dtype="int32", seed=None):
        return ops.full(shape, minval, dtype)

    def categorical(logits, num_samples, dtype="int32", seed=None):
        return ops.zeros((logits.shape[0], num_samples), dtype)

    def same(inputs, *args, **kwargs):
        return inputs

    names = ("normal", "truncated_normal", "gamma", "beta", "binomial")
    instead = dict.fromkeys(names, normal) | {
        "uniform": uniform,
        "randint": randint,
        "categorical": categorical,
        "dropout": same,
        "shuffle": same,
    }
    with patched_here(backend_random, instead):
        yield


# Casts differ, everything else is as in float32.


def _align(own, reference):
    """Refers values to those in their place in float32."""
    groups = [_by_call(own), _by_call(reference)]
    for name, found in groups[0].items():
        for one, other in _pairs(found, groups[1].get(name, [])):
            _refer(one, other)
    for operation in own:
        if operation.name == "cast" and operation.inputs:
            source = operation.inputs[0]
            operation.output.reference = source.reference


def _by_call(operations):
    kept = [op for op in operations if op.name != "cast"]
    kept.sort(key=lambda op: op.scope)
    groups = itertools.groupby(kept, key=lambda op: op.scope)
    return {name: list(found) for name, found in groups}


def _pairs(own, reference):
    names = [[op.name for op in found] for found in (own, reference)]
    if names[0] == names[1]:
        return zip(own, reference, strict=True)
    matcher = difflib.SequenceMatcher(None, *names, autojunk=False)
    return [
        (own[block.a + i], reference[block.b + i])
        for block in matcher.get_matching_blocks()
        for i in range(block.size)
    ]


def _refer(one, other):
    pairs = itertools.chain(
        zip(one.inputs, other.inputs, strict=False),
        zip(one.outputs, other.outputs, strict=False),
    )
    for value, exact in pairs:
        value.reference = value.reference or exact


def range_of(array) -> Range | None:
    """Returns the `Range` of an array or a variable, `None` if it is empty."""
    array = np.asarray(ops.convert_to_numpy(array), "float32").ravel()
    finite = array[np.isfinite(array)]
    if not finite.size:
        return None
    magnitudes = np.abs(finite)
    other = magnitudes[magnitudes > 0]
    return Range(
        float(finite.min()),
        float(finite.max()),
        float(other.min(initial=np.inf)),
        other.size < finite.size,
        float((other < VANISHING).mean()) if other.size else 0.0,
        float(finite.std(dtype="float64")),
        finite.size == array.size,
        _unit(finite),
    )


def _unit(array):
    """Largest power of two that all numbers are multiples of, 0 if none."""
    if not (array == np.round(array)).all() or np.abs(array).max() >= 2**31:
        return 0.0
    bits = int(np.bitwise_or.reduce(np.abs(array).astype("int64")))
    return float(bits & -bits)
