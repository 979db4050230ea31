"""Gathering the statistics of all tensors of one step in few operations."""

import collections
import contextlib
import math

from keras import ops

from keras_mixprec.backend import probe as backend_probe
from keras_mixprec.numerics.statistics import WIDTH, measure, pack

# Tensors up to this many elements are stacked by shape, so that hundreds cost
# what a handful does. Above 2**16 the copy costs more than it saves, and so
# does memory that waits for the end of the step.
_LARGEST_STACKED = 2**16

# What a dimension counts as that is known only when the step runs, which on
# TensorFlow is that of the samples. Joining takes 26 bytes an element, so that
# no more than this is joined; of larger batches it is more.
_USUAL_BATCH = 64
_LARGEST_RAGGED = 2**18


class Collector:
    """Measures the tensors of one step, which may be traced.

    Args:
        outlet: The `Outlet` of the backend, through which the numbers leave.
        arguments: Tuple. What the train step was called with.
        failures: Dict that gets the reason why a tensor could not be measured,
            by the path in its key.
    """

    def __init__(self, outlet, arguments, failures):
        self._outlet = outlet
        self._failures = failures
        self._backend = backend_probe.current()
        self._trace = self._backend.own_trace(arguments)
        self._measure = self._backend.traced_once(measure)
        self._order = {}
        self._waiting = {}
        self._measured = {}
        self._counted = {}

    def put(self, key, tensor):
        """Measures one tensor, now or at the end of the step.

        Args:
            key: Tuple `(path, part, position)`.
            tensor: Float tensor of any shape.
        """
        self._number(key)
        with self._noting_failures((key,)):
            kept = None
            if _is_small(tensor, _USUAL_BATCH):
                kept = self._backend.kept(tensor, self._trace)
            if kept is None:
                self.put_stack((key,), join([tensor]))
            else:
                self._waiting[key] = kept

    def put_stack(self, keys, stack):
        """Measures tensors that `join` has joined, as `put` does one."""
        for key in keys:
            self._number(key)
        with self._noting_failures(keys), self._backend.without_gradient():
            found = self._measure(stack)
            if self._backend.belongs(found[0], self._trace):
                self._measured[keys] = found
            else:
                self._outlet.put(self._number(keys[0]), pack([found])[0])

    def put_counts(self, keys, counts):
        """Keeps what has been counted already, in the place of exponents.

        Args:
            keys: Tuple of keys.
            counts: Float32 tensor `(len(keys), n)`.
        """
        for key in keys:
            self._number(key)
        missing = WIDTH - 3 - counts.shape[1]
        self._counted[keys] = ops.pad(counts, ((0, 0), (3, missing)))

    def carry(self, result):
        """Measures what is left.

        Returns:
            What the instrumented step is to return in place of `result`.
        """
        waiting, self._waiting = self._waiting, {}
        for keys, stack in self._stacks(waiting):
            self.put_stack(keys, stack)
        keys = [*self._measured, *self._counted]
        rows = [pack(list(self._measured.values()))] if self._measured else []
        rows += self._counted.values()
        return self._outlet.carry(
            result,
            tuple(self._number(key) for group in keys for key in group),
            ops.concatenate(rows) if rows else None,
        )

    def _stacks(self, waiting):
        """Yields keys and what their tensors are joined to."""
        known, unknown, numbers = {}, {}, collections.Counter()
        for key, tensor in waiting.items():
            if None not in tuple(tensor.shape):
                known[key] = tensor
            else:
                dtype = str(tensor.dtype)
                part = dtype, numbers[dtype] // _LARGEST_RAGGED
                unknown.setdefault(part, {})[key] = tensor
                numbers[dtype] += _size(tensor, _USUAL_BATCH)
        for group in group_by_shape(list(known.values())):
            keys = tuple(list(known)[index] for index in group)
            yield keys, join([known[key] for key in keys])
        for tensors in unknown.values():
            yield tuple(tensors), self._backend.ragged(list(tensors.values()))

    @contextlib.contextmanager
    def _noting_failures(self, keys):
        # Whatever a layer hands on, training must not stop here.
        try:
            yield
        except Exception as error:
            for path, _, _ in keys:
                reason = f"{type(error).__name__}: {error}"
                self._failures.setdefault(path, reason)

    def _number(self, key):
        """The key behind its place among all keys."""
        return self._order.setdefault(key, len(self._order)), *key


def group_by_shape(tensors):
    """Returns lists of the indices of tensors that are to be joined."""
    groups = {}
    for index, tensor in enumerate(tensors):
        alone = None if _is_small(tensor) else index
        key = (str(tensor.shape), str(tensor.dtype), alone)
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def join(tensors):
    """Returns tensors of one shape as the rows `(k, n)` of one.

    A single one may be of any shape, and is not copied.
    """
    joined = tensors[0] if len(tensors) == 1 else ops.stack(tensors)
    return ops.reshape(joined, (len(tensors), -1))


def _is_small(tensor, unknown=math.inf):
    """Whether a tensor is small enough to be stacked."""
    ranked = getattr(tensor.shape, "dims", tensor.shape) is not None
    return ranked and _size(tensor, unknown) <= _LARGEST_STACKED


def _size(tensor, unknown):
    """Number of elements, given what an unknown dimension counts as."""
    return math.prod(unknown if n is None else n for n in tensor.shape)
