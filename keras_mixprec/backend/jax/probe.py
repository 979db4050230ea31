"""Measurements of a step on JAX; see `interface.py`."""

import contextlib
import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from keras_mixprec.backend import fused_ranges
from keras_mixprec.backend.interface import EXPONENTS, SHIFT
from keras_mixprec.keras_internals import holding

# Bits of exponent and mantissa.
_BITS = {jnp.dtype("float16"): (5, 10), jnp.dtype("bfloat16"): (8, 7)}


def measure(tensors, floors):
    return fused_ranges.measure(_rounded(tensors), floors, _bitcast, _reduce)


def _rounded(tensors):
    if tensors.dtype not in _BITS:
        return tensors
    return jax.lax.reduce_precision(tensors, *_BITS[tensors.dtype])


def _bitcast(tensor, dtype):
    return jax.lax.bitcast_convert_type(tensor, jnp.dtype(dtype))


def _reduce(tensors):
    zeros = [np.zeros((), tensor.dtype) for tensor in tensors]
    return jax.lax.reduce(tensors, zeros, _together, (1,))


def _together(these, those):
    largest, *sums = zip(these, those, strict=True)
    # Which of `jax.numpy` are functions of their own, not merged into the loop.
    return jax.lax.max(*largest), *(jax.lax.add(a, b) for a, b in sums)


def exponents(tensors):
    magnitudes = jnp.abs(_rounded(tensors).astype("float32"))
    values = _bitcast(magnitudes, "int32") >> SHIFT
    values = values + jnp.arange(len(values))[:, None] * EXPONENTS
    counts = jnp.zeros(len(values) * EXPONENTS, "int32")
    counts = counts.at[values.reshape(-1)].add(1, mode="promise_in_bounds")
    return counts.reshape((-1, EXPONENTS))


def traced_once(function):
    return jax.jit(function)


def without_gradient():
    return contextlib.nullcontext()


def rows(gradient):
    return gradient


def twice(arguments):
    # Keras takes the batch off its iterator before it traces the step.
    state, iterator = arguments
    first, second = itertools.tee(iterator)
    return (state, first), (state, second)


def state_given(model, arguments):
    # In `fit` the variables themselves are empty.
    variables = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
    state, _ = arguments
    return holding(sum(variables, []), jax.tree.leaves(state))


def own_trace(arguments):
    return next(filter(None, map(_trace, jax.tree.leaves(arguments))), None)


def belongs(tensor, trace):
    own = _trace(tensor)
    return own is None or own is trace


def kept(tensor, trace):
    return tensor if belongs(tensor, trace) else None


class Outlet:
    """The results of the step; callbacks where it is a part that loops.

    A callback takes 100 microseconds.
    """

    def __init__(self):
        self._rows = None
        self._found = {}

    def carry(self, result, keys, rows):
        logs, state = result
        if rows is not None:
            rows = _replicated(rows)
        return _Carried(logs, rows, keys), state

    def put(self, key, row):
        keep = functools.partial(self._found.__setitem__, key)
        jax.debug.callback(keep, row)

    def take(self, result):
        self._rows, state = result
        return self._rows.logs, state

    def read(self):
        jax.effects_barrier()
        found = {k: np.asarray(row)[None] for k, row in self._found.items()}
        if self._rows is not None and self._rows.keys:
            rows = np.asarray(self._rows.rows.addressable_data(0))
            found |= zip(self._rows.keys, rows[:, None], strict=True)
        return list(found.items())


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("logs", "rows"),
    meta_fields=("keys",),
)
@dataclasses.dataclass
class _Carried:
    """What a step returns in the place of its logs."""

    logs: Any
    rows: Any
    keys: tuple


def _trace(tensor):
    return tensor._trace if isinstance(tensor, jax.core.Tracer) else None


def _replicated(rows):
    """The rows, all of them on each device of a distribution."""
    distribution = keras.distribution.distribution()
    if distribution is None:
        return rows
    mesh = distribution.device_mesh.backend_mesh
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.lax.with_sharding_constraint(rows, everywhere)
