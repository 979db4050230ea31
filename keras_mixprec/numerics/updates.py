"""What an optimizer is given in a step, and what it does with it."""

import keras
from keras import ops

from keras_mixprec.backend import probe as backend_probe
from keras_mixprec.numerics.collector import group_by_shape, join


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
        inverse = 1.0 / loss_scale(optimizer)
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
                lost = ops.logical_and(moving, ops.equal(before, after))
                counts = [
                    ops.cast(ops.sum(ops.cast(x, "int32"), 1), "float32")
                    for x in (lost, moving)
                ]
                self._collector.put_counts(
                    self._keys(variables, "lost_updates"),
                    ops.stack(counts, axis=1),
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
        return ops.copy(self._inner._iterations.value)

    def _keys(self, variables, part):
        owners = map(self._owner_of, variables)
        return tuple((path, part, position) for path, position in owners)


def _groups(pairs):
    """Yields whether to count lost updates, and pairs that can be joined."""
    rows = [backend_probe.current().rows(gradient) for gradient, _ in pairs]
    for alike in group_by_shape(rows):
        groups = {}
        for index in alike:
            gradient, variable = pairs[index]
            # A sparse gradient is about some rows only, and what overwrites
            # its variable is none.
            counted = rows[index] is gradient and not getattr(
                variable, "overwrite_with_gradient", False
            )
            key = counted, str(variable.dtype)
            groups.setdefault(key, []).append((rows[index], variable))
        for (counted, _), group in groups.items():
            yield counted, group


def accumulation_steps(optimizer) -> int:
    """Returns of how many steps the gradients make one update."""
    return _inner(optimizer).gradient_accumulation_steps or 1


def _inner(optimizer):
    return getattr(optimizer, "inner_optimizer", optimizer)


def _learning_rate(optimizer):
    """The learning rate, 1 where asking for it might change something."""
    rate = getattr(optimizer, "_learning_rate", 1.0)
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        return rate(optimizer._iterations)
    return rate.value if isinstance(rate, keras.Variable) else 1.0


def loss_scale(optimizer):
    """Returns what an optimizer's gradients are scaled by in this step."""
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer.loss_scale_factor or 1.0
    if getattr(optimizer, "_unscaled", False):
        return 1.0
    # Where ours keeps it: who reads `dynamic_scale` is taken to multiply by it.
    ours = getattr(optimizer, "_scale_variable", None)
    return ops.convert_to_tensor(
        optimizer.dynamic_scale if ours is None else ours
    )
