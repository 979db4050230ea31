"""One step: check all gradients, agree, then apply everywhere or nowhere."""

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

# A dtype that ends below this holds less than float32: float16, not bfloat16.
_NARROW = 2.0**100


class CheckedGradients:
    """The gradients of one optimizer, checked but not applied yet.

    Args:
        optimizer: A built `LossScaleOptimizer`.
        gradients: List of scaled gradients, or `None`, one per variable.
        variables: List of the variables to update.
        scale: Tensor. The loss scale.
        unscaled: Boolean, whether the gradients were unscaled by hand.
        seen: List of what `overflowing` has said of them as they were unscaled.
    """

    def __init__(self, optimizer, gradients, variables, scale, unscaled, seen):
        self._optimizer = optimizer
        self._variables = variables
        self._backend = active.step()
        self.scale = scale
        self._inverse = 1.0 if unscaled else 1.0 / scale
        self._gradients = as_tensors(gradients)
        # The gradients that are not `None`, and their variables.
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
        # Their size, and whether it is ordinary, if the optimizer skips spikes.
        self.size: Any = None
        self.ordinary: Any = True
        self.finite, self.norms, self.flags = self._examine(maxima, seen, kept)

    def _examine(self, maxima, seen, kept):
        """Checks all gradients; norms and flags are in the order of `build`."""
        gradients, backend = self._given, self._backend
        norms = self._over_replicas(backend.gradient_norms(gradients))
        if spikes := self._optimizer.spikes:
            squares = ops.square(ops.where(np.array(kept), 0.0, norms))
            self.size = ops.sqrt(ops.sum(squares))
            self.ordinary = ops.logical_not(spikes.is_spike(self.size))
        # NaN fits nowhere. Not `logical_not` of the comparison, because
        # TensorFlow's graph optimizer turns that into `greater`, which NaN
        # fails too.
        fits = ops.less_equal(norms, largest_norms(gradients))
        if min(maxima) < _NARROW:
            # A small norm shows that every number fits float16; a large one
            # does not show the opposite. XLA's maximum loses NaN, so both are
            # checked.
            largest = self._over_replicas(backend.gradient_maxima(gradients))
            narrow = ops.less_equal(largest, np.array(maxima, "float32"))
            fits = ops.logical_and(fits, narrow)
        for overflows in seen:
            # Tensors of an inner compiled function cannot be used here.
            if not backend.are_of_one_trace(overflows, fits):
                continue
            # Gradients cannot be matched by position.
            if overflows.shape != fits.shape:
                overflows = ops.max(overflows)
            fitted = ops.equal(backend.sum_over_replicas(overflows), 0)
            fits = ops.logical_and(fits, fitted)
        flags = ops.where(fits, 0, 1)
        if self._order is not None:
            norms, flags = map(self._in_build_order, (norms, flags))
        return ops.all(fits), norms, flags

    def _over_replicas(self, magnitudes):
        # Replicas add their gradients up after this: the sum of the norms
        # bounds the norm of the sum, so what fits here fits there.
        return self._backend.sum_over_replicas(magnitudes * self._factor)

    def _in_build_order(self, values):
        if self._order is None:
            return values
        shape = (self._count, *values.shape[1:])
        return ops.scatter(self._order, values, shape)

    def commit(self, finite, ordinary):
        """Applies the update if it shall be, and records the step.

        Args:
            finite: Boolean, or a boolean scalar tensor.
            ordinary: As `finite`. False for a spike, which leaves the loss
                scale alone.
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
                # A spike, or a micro-batch that is skipped only because another
                # one in its window overflowed, is not recorded as an overflow.
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
    """Returns which of some gradients are not finite, as 0 and 1, in a list.

    Args:
        gradients: List of tensors. Without any, the list is empty.
    """
    if not gradients:
        return []
    norms = active.step().gradient_norms(gradients)
    return [ops.where(ops.less_equal(norms, FLOAT32_MAX), 0, 1)]


def commit_together(steps):
    """Applies all of `steps`, or none if one is not finite or a spike."""
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
    """One of two values, by a Python boolean or a boolean tensor."""
    if isinstance(condition, (bool, np.bool_)):
        return if_true if condition else if_false
    return ops.where(condition, if_true, if_false)


class AccumulationWindow:
    """Discards all micro-batches of a window in which one overflows.

    So do torch, Apex, DeepSpeed, Megatron and Paddle. The inner optimizer
    starts over and does not get the rest of the window, so that windows keep
    their beginnings.

    Args:
        inner: The inner optimizer.
        history: The `StepHistory`, which holds how many are left to discard.
    """

    def __init__(self, inner, history):
        self._inner, self._history = inner, history
        self._steps = inner.gradient_accumulation_steps

    def place(self, on_host: bool, read) -> tuple:
        """Returns where the next micro-batch is; before `discard`.

        Args:
            on_host: Boolean.
            read: Function from a variable to its value, there or as a tensor.

        Returns:
            Its position in its window, from 0, and how many micro-batches are
            still to be discarded, it included.
        """
        position = read(micro_batches(self._inner)) % self._steps
        to_discard = read(self._history.to_discard)
        # Numbers, not the memory of a variable that `discard` writes to.
        return (
            (int(position), int(to_discard))
            if on_host
            else (position, to_discard)
        )

    def discard(self, overflows, position):
        """Makes the inner optimizer start the window over if it overflows."""
        for accumulated in accumulated_gradients(self._inner):
            if accumulated is not None:
                old = ops.convert_to_tensor(accumulated)
                new = _where(overflows, ops.zeros_like(old), old)
                accumulated.assign(new)
        # A window that is being discarded has begun already: position 0.
        iterations = micro_batches(self._inner)
        old = ops.convert_to_tensor(iterations)
        start = old - ops.cast(position, old.dtype)
        iterations.assign(_where(overflows, start, old))

    def advance(self, finite, position, to_discard):
        """Counts a micro-batch."""
        left = _where(finite, 0, self._steps - 1 - position)
        left = _where(to_discard > 0, to_discard - 1, left)
        self._history.to_discard.assign(left)


def checked_variables(grads, variables) -> list:
    """Returns the variables, a list, if there is a gradient for each.

    Args:
        grads: List of gradients.
        variables: Iterable of variables; `None` if they are not known.

    Raises:
        ValueError: If they are not known, there are not as many gradients, or
            no gradient at all.
    """
    if variables is None:
        raise ValueError(
            "This optimizer has not been built yet, so `apply` needs the "
            "variables as well: `apply(grads, trainable_variables)`."
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
