"""Checks the gradients of a step on all replicas, then applies or skips it."""

import functools
from typing import Any

import numpy as np
from keras import ops

from keras_mixprec.backend import active
from keras_mixprec.backend.grouped_norms import FLOAT32_MAX, largest_norms
from keras_mixprec.formats import get_format
from keras_mixprec.keras_internals import (
    accumulated_gradients,
    micro_batches,
    updated_variables,
    variable_indices,
)
from keras_mixprec.loss_scaling.stages import as_tensors

# A dtype whose maximum is below this number, such as float16, has a narrower
# range than float32. The maximum of bfloat16 is above this number.
_NARROW = 2.0**100


class CheckedGradients:
    """The gradients of one optimizer, checked but not applied yet.

    Args:
        optimizer: A built `LossScaleOptimizer`.
        gradients: List of scaled gradients, or `None`, one per variable.
        variables: List of the variables to update.
        scale: Tensor. The loss scale.
        unscaled: Boolean. True if `unscale` has already unscaled the gradients.
        seen: List of the results of `overflowing` from calls to `unscale`.
    """

    def __init__(self, optimizer, gradients, variables, scale, unscaled, seen):
        self._optimizer = optimizer
        self._variables = variables
        self._backend = active.step()
        self.scale = scale
        self._inverse = 1.0 if unscaled else 1.0 / scale
        self._gradients = as_tensors(gradients)
        # Leave out gradients that are `None`, and their variables.
        self._given, present, self._keep, kept = [], [], [], []
        maxima = []
        for gradient, variable in zip(self._gradients, variables, strict=True):
            keep = getattr(variable, "overwrite_with_gradient", False)
            self._keep.append(keep)
            if gradient is not None:
                self._given.append(gradient)
                present.append(variable)
                kept.append(keep)
                maxima.append(_maximum(variable.dtype))
        self._factor = self._inverse
        if any(kept):
            self._factor = ops.where(np.array(kept), 1.0, self._inverse)
        order = variable_indices(optimizer, present)
        self._count = len(updated_variables(optimizer))
        in_order = order == list(range(self._count))
        self._order = None if in_order else np.array(order)[:, None]
        # `size` is the norm of all gradients together. `ordinary` is false if
        # the step is a spike. Both are computed only if the optimizer skips
        # spikes.
        self.size: Any = None
        self.ordinary: Any = True
        self.finite, self.norms, self.flags = self._examine(maxima, seen, kept)

    def _examine(self, maxima, seen, kept):
        """Checks all gradients. Norms and flags are in build order."""
        gradients, backend = self._given, self._backend
        norms = self._over_replicas(backend.gradient_norms(gradients))
        if spikes := self._optimizer.spikes:
            squares = ops.square(ops.where(np.array(kept), 0.0, norms))
            self.size = ops.sqrt(ops.sum(squares))
            self.ordinary = ops.logical_not(spikes.is_spike(self.size))
        # A gradient norm of NaN must fail the check, so never negate
        # `less_equal`. TensorFlow's graph optimizer would turn
        # `logical_not(less_equal(...))` into `greater`, which is false for NaN.
        fits = ops.less_equal(norms, largest_norms(gradients))
        if min(maxima) < _NARROW:
            # A norm above float16's maximum does not mean that an element
            # overflows float16, so compare the largest elements. XLA's maximum
            # ignores NaN, so keep the check of the norms too.
            largest = self._over_replicas(backend.gradient_maxima(gradients))
            narrow = ops.less_equal(largest, np.array(maxima, "float32"))
            fits = ops.logical_and(fits, narrow)
        for overflows in seen:
            # A compiled function cannot use a tensor from the trace of a
            # different function.
            if not backend.are_of_one_trace(overflows, fits):
                continue
            # If `unscale` and `apply` got different gradients, an overflow in
            # `unscale` counts against all gradients.
            if overflows.shape != fits.shape:
                overflows = ops.max(overflows)
            fitted = ops.equal(backend.sum_over_replicas(overflows), 0)
            fits = ops.logical_and(fits, fitted)
        flags = ops.where(fits, 0, 1)
        if self._order is not None:
            norms, flags = map(self._in_build_order, (norms, flags))
        return ops.all(fits), norms, flags

    def _over_replicas(self, magnitudes):
        # Replicas sum their gradients later. The sum of the replicas' norms is
        # an upper bound for the norm of the summed gradient. A finite bound
        # therefore rules out overflow in the summed gradient.
        return self._backend.sum_over_replicas(magnitudes * self._factor)

    def _in_build_order(self, values):
        if self._order is None:
            return values
        shape = (self._count, *values.shape[1:])
        return ops.scatter(self._order, values, shape)

    def commit(self, finite, ordinary):
        """Applies or skips the update, and records the step.

        Args:
            finite: Boolean, or a boolean scalar tensor. False if a gradient is
                not finite.
            ordinary: Boolean, or a boolean scalar tensor. False for a spike,
                which does not lower the loss scale.
        """
        optimizer, window = self._optimizer, self._optimizer.window
        backend, on_host = self._backend, isinstance(finite, bool)
        read = backend.read if on_host else backend.value
        position, to_discard = window.place(on_host, read) if window else (0, 0)
        sound = finite
        if ordinary is not True:
            sound = _where(finite, ordinary, False)
        applied = _where(to_discard > 0, False, sound) if window else sound

        def record():
            optimizer._advance(finite, self.norms, read)
            if optimizer.spikes is not None:
                optimizer.spikes.record(self.size, finite, ordinary)
            if window:
                window.advance(sound, position, to_discard)

        def remember(skipped):
            if window:
                window.discard(skipped, position)
            if window or optimizer.spikes is not None:
                # Record overflows only. A step may also be skipped because of a
                # spike, or because another micro-batch of the same accumulation
                # window overflowed.
                skipped = _where(finite, False, True)
            if skipped is not False:
                kinds = backend.nonfinite_kinds(self._given, skipped)
                kinds = self._in_build_order(backend.sum_over_replicas(kinds))
                optimizer.history.remember(skipped, self.flags, kinds)

        backend.commit(
            optimizer,
            applied,
            self._unscaled,
            self._variables,
            record,
            remember,
        )

    def _unscaled(self):
        return self._backend.unscale(
            self._gradients, self._inverse, self._keep, self._variables
        )


@functools.cache
def _maximum(dtype):
    return min(get_format(getattr(dtype, "name", dtype)).maximum, FLOAT32_MAX)


def overflowing(gradients):
    """Returns a list of one tensor: 1 for non-finite gradients, else 0.

    Args:
        gradients: List of tensors. For an empty list, the result is empty.
    """
    if not gradients:
        return []
    norms = active.step().gradient_norms(gradients)
    return [ops.where(ops.less_equal(norms, FLOAT32_MAX), 0, 1)]


def commit_together(steps):
    """Applies all of `steps`, or none if any is non-finite or a spike."""
    to_host = active.step().to_host_bool
    finite = to_host(_all([step.finite for step in steps]))
    known = [step.ordinary for step in steps if step.ordinary is not True]
    ordinary = to_host(_all(known)) if known else True
    for step in steps:
        step.commit(finite, ordinary)


def _all(conditions):
    first, *others = conditions
    return ops.all(ops.stack(conditions)) if others else first


def _where(condition, if_true, if_false):
    """Selects a value by a Python boolean or a boolean tensor."""
    if isinstance(condition, (bool, np.bool_)):
        return if_true if condition else if_false
    return ops.where(condition, if_true, if_false)


class AccumulationWindow:
    """Discards all micro-batches of a window in which one overflows.

    torch, Apex, DeepSpeed, Megatron and Paddle do the same. The inner optimizer
    restarts its window and does not get the remaining micro-batches, so later
    windows start at the usual steps.

    Args:
        inner: The inner optimizer.
        history: The `StepHistory`, which stores how many micro-batches are left
            to discard.
    """

    def __init__(self, inner, history):
        self._inner, self._history = inner, history
        self._steps = inner.gradient_accumulation_steps

    def place(self, on_host: bool, read) -> tuple:
        """Returns the position of the next micro-batch.

        Call `place` before `discard`.

        Args:
            on_host: Boolean. If `True`, the result is Python ints.
            read: Function that returns the value of a variable.

        Returns:
            The position in the window, counted from 0, and the number of
            micro-batches that are still to be discarded, including the next.
        """
        position = read(micro_batches(self._inner)) % self._steps
        to_discard = read(self._history.to_discard)
        # On the host, convert the position and the count to Python ints. NumPy
        # values may share memory with a variable that `discard` overwrites.
        return (
            (int(position), int(to_discard))
            if on_host
            else (position, to_discard)
        )

    def discard(self, overflows, position):
        """Restarts the window of the inner optimizer if `overflows` is true."""
        for accumulated in accumulated_gradients(self._inner):
            if accumulated is not None:
                old = ops.convert_to_tensor(accumulated)
                new = _where(overflows, ops.zeros_like(old), old)
                accumulated.assign(new)
        iterations = micro_batches(self._inner)
        old = ops.convert_to_tensor(iterations)
        start = old - ops.cast(position, old.dtype)
        iterations.assign(_where(overflows, start, old))

    def advance(self, finite, position, to_discard):
        """Updates the number of micro-batches that are left to discard."""
        left = _where(finite, 0, self._steps - 1 - position)
        left = _where(to_discard > 0, to_discard - 1, left)
        self._history.to_discard.assign(left)


def checked_variables(grads, variables) -> list:
    """Returns the variables as a list, one for each gradient.

    Args:
        grads: List of gradients.
        variables: Iterable of variables, or `None` if they are not known.

    Raises:
        ValueError: If the variables are not known, the numbers of gradients and
            variables differ, or all gradients are `None`.
    """
    if variables is None:
        raise ValueError(
            "This optimizer has not been built yet, so `apply` needs the "
            "variables: call `apply(grads, trainable_variables)`."
        )
    variables = list(variables)
    if len(grads) != len(variables):
        raise ValueError(
            "There must be one gradient per variable. Received: "
            f"{len(grads)} gradients for {len(variables)} variables"
        )
    if all(g is None for g in grads):
        raise ValueError(
            "No gradients provided for any variable. Check that the loss "
            "depends on the variables. Received: grads="
            f"{grads[:3]}{'...' if len(grads) > 3 else ''}"
        )
    return variables
