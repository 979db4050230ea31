"""Gathering the statistics of a whole step in few operations."""

import collections
import contextlib
import functools
import math

import keras
from keras import ops

from keras_mixprec._checks import raise_if_strict
from keras_mixprec.backend import active
from keras_mixprec.formats import Format
from keras_mixprec.keras_internals import learning_rate_object, micro_batches
from keras_mixprec.numerics.statistics import COLUMNS, measure

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
        limits: `Format` that small numbers are counted by.
        outlet: The `Outlet` of the backend, through which the numbers leave.
        arguments: Tuple. What the train step was called with.
        failures: Dict that gets the reason why a tensor could not be measured,
            by the path in its key.
    """

    def __init__(self, limits: Format, outlet, arguments, failures):
        self._outlet = outlet
        self._failures = failures
        self._backend = active.probe()
        self._trace = self._backend.own_trace(arguments)
        self._measure = self._backend.traced_once(
            functools.partial(measure, limits=limits)
        )
        self._order = {}
        self._waiting = {}
        self._rows = {}

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
            rows = self._measure(stack)
            if self._backend.belongs(rows, self._trace):
                self._rows[keys] = rows
            else:
                self._outlet.put(self._number(keys[0]), rows[0])

    def put_updates(self, keys, moved, moving):
        """Keeps how many weights an update moved, of those that it was to.

        Which are the sizes and the elements that are not zero of a reading.

        Args:
            keys: Tuple of keys.
            moved: Float32 tensor, a number for each key.
            moving: Float32 tensor, as `moved`.
        """
        for key in keys:
            self._number(key)
        zeros = ops.zeros_like(moved)
        columns = {"size": moving, "nonzero": moved}
        self._rows[keys] = ops.stack(
            [columns.get(name, zeros) for name in COLUMNS], axis=1
        )

    def carry(self, result):
        """Measures what is left.

        Returns:
            What the instrumented step is to return in place of `result`.
        """
        waiting, self._waiting = self._waiting, {}
        for keys, stack in self._stacks(waiting):
            self.put_stack(keys, stack)
        return self._outlet.carry(
            result,
            tuple(self._number(key) for group in self._rows for key in group),
            ops.concatenate([*self._rows.values()]) if self._rows else None,
        )

    def _stacks(self, waiting):
        """Yields keys and what their tensors are joined to."""
        known, unknown, numbers = {}, {}, collections.Counter()
        for key, tensor in waiting.items():
            if None not in tuple(tensor.shape):
                known[key] = tensor
            else:
                size = _size(tensor, _USUAL_BATCH)
                alike = str(tensor.dtype), size
                part = *alike, numbers[alike] // _LARGEST_RAGGED
                unknown.setdefault(part, {})[key] = tensor
                numbers[alike] += size
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
            raise_if_strict(error)
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


class Update:
    """One call of an optimizer, from the gradients that it is given on.

    Args:
        collector: `Collector`, which gets the unscaled gradients now.
        optimizer: The optimizer.
        gradients: List of gradients, or `None`, one per variable.
        variables: List of variables.
        owner_of: Function from a variable to the path of its layer and its
            position there.
    """

    def __init__(self, collector, optimizer, gradients, variables, owner_of):
        self._collector = collector
        self._owner_of = owner_of
        self._inner = _inner(optimizer)
        self._iterations = self._steps()
        self._rate = _learning_rate(self._inner)
        self._groups = []
        inverse = 1.0 / loss_scale(optimizer, gradients)
        pairs = [
            (gradient, variable)
            for gradient, variable in zip(gradients, variables, strict=True)
            if gradient is not None
        ]
        for counted, group in _groups(pairs):
            self._begin(counted, *zip(*group, strict=True), inverse)

    def _begin(self, counted, gradients, variables, inverse):
        stack = join(gradients)
        keys = self._keys(variables, "weight_gradient")
        unscaled = ops.cast(stack, "float32") * inverse
        self._collector.put_stack(keys, unscaled)
        before = moving = None
        if counted:
            before = ops.copy(join([v.value for v in variables]))
            moving = ops.not_equal(stack, 0)
        self._groups.append((variables, before, moving))

    def finish(self):
        """Measures the variables after the update."""
        updated = self._has_updated()
        for variables, before, moving in self._groups:
            values = [ops.convert_to_tensor(v.value) for v in variables]
            after = join(values)
            keys = self._keys(variables, "weight")
            self._collector.put_stack(keys, after)
            if moving is not None:
                moving = ops.logical_and(moving, updated)
                moved = ops.logical_and(moving, ops.not_equal(before, after))
                self._collector.put_updates(
                    self._keys(variables, "updates"),
                    *map(_count, (moved, moving)),
                )

    def _has_updated(self):
        """Whether this step was to change the variables.

        Not if it was skipped, nor if it only adds its gradients to those of
        an update to come, nor if the learning rate is zero.
        """
        taken = ops.not_equal(self._steps(), self._iterations)
        window = accumulation_steps(self._inner)
        last = ops.equal((self._iterations + 1) % window, 0)
        moves = ops.not_equal(self._rate, 0)
        return ops.logical_and(ops.logical_and(taken, last), moves)

    def _steps(self):
        return ops.copy(micro_batches(self._inner).value)

    def _keys(self, variables, part):
        owners = map(self._owner_of, variables)
        return tuple((path, part, position) for path, position in owners)


def _count(flags):
    return ops.cast(ops.sum(ops.cast(flags, "int32"), 1), "float32")


def _groups(pairs):
    """Yields whether to count lost updates, and pairs that can be joined."""
    rows = [active.probe().rows(gradient) for gradient, _ in pairs]
    for alike in group_by_shape(rows):
        groups = {}
        for index in alike:
            gradient, variable = pairs[index]
            # A sparse gradient is about some rows only, and what overwrites
            # its variable is none.
            counted = rows[index] is gradient and not getattr(
                variable, "overwrite_with_gradient", False
            )
            # As many rows may be used of tables that are not as long.
            key = counted, str(variable.dtype), tuple(variable.shape)
            groups.setdefault(key, []).append((rows[index], variable))
        for (counted, *_), group in groups.items():
            yield counted, group


def accumulation_steps(optimizer) -> int:
    """Returns of how many steps the gradients make one update."""
    return _inner(optimizer).gradient_accumulation_steps or 1


def _inner(optimizer):
    return getattr(optimizer, "inner_optimizer", optimizer)


def _learning_rate(optimizer):
    """The learning rate, 1 where asking for it might change something."""
    if not hasattr(optimizer, "learning_rate"):  # A `MultiOptimizer`.
        return 1.0
    rate = learning_rate_object(optimizer)
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        return rate(micro_batches(optimizer))
    return rate.value if isinstance(rate, keras.Variable) else 1.0


def loss_scale(optimizer, gradients=()):
    """Returns what an optimizer's gradients are scaled by in this step."""
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer.loss_scale_factor or 1.0
    # Ours knows whether they have been unscaled by hand.
    if scale_of := getattr(optimizer, "scale_of", None):
        return scale_of(gradients)
    return ops.convert_to_tensor(optimizer.dynamic_scale)
