"""What the optimizer remembers of its steps, as variables of the step itself.

Nothing here needs the host: a compiled step, or many of them in one call,
keeps the record, and whoever reads it finds every non-finite step counted, the
numbers of the last 1,024 of them and the last 32 in full.
"""

from typing import NamedTuple

import numpy as np
from keras import ops

from keras_mixprec.backend import active
from keras_mixprec.formats import NONFINITE_KINDS, count_kinds
from keras_mixprec.keras_internals import KerasSaveable
from keras_mixprec.loss_scaling import current_step as inputs

# Skipped steps kept in full, and those of which only the number is: the loss
# scale of every step in between follows from these. 1,024 last for 20 times
# `update_freq` at its default even if every step is skipped.
CAPACITY = 32
STEPS_CAPACITY = 1024

# Columns of `counts`.
STEPS, SKIPPED, CONSECUTIVE, HYSTERESIS = range(4)

# The bit of each of `NONFINITE_KINDS` in the flag of a gradient in the ring.
# The first bit says that it does not fit the variable's dtype, whatever it is.
_BITS = np.array([2, 4, 8], "int32")


class NonfiniteStep(NamedTuple):
    """One skipped step.

    Attributes:
        step: Int. Its number among all attempted steps, counted from 1.
        scale: Float. The loss scale it ran with.
        variables: List of the paths of the variables whose gradient was not
            finite.
        inputs: Dict from `"x"`, `"y"` and `"sample_weight"`, where these are
            not finite themselves, to the first such row of the batch. Empty
            as well where the batch is not known: in `fit` without a callback
            of this package.
        kinds: Dict from these paths to what the gradient held, on any replica:
            a list of those of `"inf"`, `"-inf"` and `"nan"`, as it was before
            the loss scale was divided out. Empty where it was finite but its
            norm, or what the variable's dtype holds, was exceeded, and in
            files of before this was recorded.
        loss: List of those that the loss was, on any replica; empty if it was
            finite, or is not known: outside of `fit` with a callback of this
            package, and in a `train_step` of the user's own.
    """

    step: int
    scale: float
    variables: list
    inputs: dict = {}
    kinds: dict = {}
    loss: list = []


class StepHistory(KerasSaveable):
    """Counters, last gradient norms and a ring of recent non-finite steps."""

    _NAMES = (
        "counts",
        "pending_scale",
        "gradient_norms",
        "overflows",
        "nonfinite_counts",
        "recent_steps",
        "recent_scales",
        "recent_flags",
        "recent_inputs",
        "lost_weights",
    )
    # The file of a run without any need not be larger for them: HDF5 takes
    # 0.5 kB for each.
    _OFTEN_ZERO = ("nonfinite_counts", "recent_inputs", "lost_weights")

    def __init__(self):
        self.paths = None
        self._unread = {}
        # The variables, once built.
        self.counts = self.pending_scale = self.gradient_norms = None
        self.overflows = self.nonfinite_counts = self.recent_steps = None
        self.recent_scales = self.recent_flags = self.recent_inputs = None
        self.lost_weights = None

    def build(self, add_variable, paths, state):
        """Creates the variables.

        Args:
            add_variable: Function `(name, shape, dtype, value=0)` that
                creates and tracks a variable of the optimizer.
            paths: List of the paths of the trainable variables.
            state: The initial `LossScaleState` of the update rule.
        """
        count = len(paths)
        self.paths = paths
        self.counts = add_variable(
            "step_counts", (4,), "int32", [0, 0, 0, int(state.hysteresis_left)]
        )
        self.pending_scale = add_variable(
            "pending_scale", (), "float32", float(state.pending_scale)
        )
        self.gradient_norms = add_variable(
            "gradient_norms", (count,), "float32"
        )
        self.overflows = add_variable("overflow_counts", (count,), "int32")
        self.nonfinite_counts = add_variable(
            "nonfinite_counts", (len(NONFINITE_KINDS),), "int32"
        )
        self.recent_steps = add_variable(
            "recent_steps", (STEPS_CAPACITY,), "int32"
        )
        self.recent_scales = add_variable(
            "recent_scales", (CAPACITY,), "float32"
        )
        # Not "uint8": TensorFlow's workers cannot send each other those.
        self.recent_flags = add_variable(
            "recent_flags", (CAPACITY, count), "int32"
        )
        self.recent_inputs = add_variable(
            "recent_inputs", (CAPACITY, len(inputs.PARTS) + 1), "int32"
        )
        # Whether a weight was not finite at the last skipped step.
        self.lost_weights = add_variable("lost_weights", (), "int32")
        self.load_own_variables(self._unread)

    @property
    def variables(self) -> list:
        """All variables of the record."""
        return [getattr(self, name) for name in self._NAMES]

    def remember(self, skipped, flags, kinds, scale, loss):
        """Writes down which variables made a step that is skipped fail.

        Comes before `record`. Where a step can branch it is called for skipped
        ones only, so that it costs a good step nothing.

        Args:
            skipped: `True`, or a boolean scalar: a step that is not skipped
                leaves everything as it is.
            flags: Int `(n,)`. 1 where a variable's gradient was not finite.
            kinds: Float `(n, 3)`. On how many replicas it held each of
                `NONFINITE_KINDS`; zeros in a step that is not skipped.
            scale: float32 scalar. The loss scale the step ran with.
            loss: Float `(3,)`. On how many replicas the loss was each of
                `NONFINITE_KINDS`.
        """
        counts = ops.convert_to_tensor(self.counts)
        flags = ops.cast(flags, "int32")
        # A good step has no flag set, so this needs no condition.
        self.overflows.assign_add(flags)
        kinds = ops.cast(ops.greater(kinds, 0), "int32")
        self.nonfinite_counts.assign_add(ops.max(kinds, axis=0))
        flags = flags + _bits(kinds)
        row = self._row(CAPACITY, counts, skipped)
        self._write(self.recent_scales, row, scale)
        self._write(self.recent_flags, row[:, None], flags[None, :])
        old = ops.convert_to_tensor(self.lost_weights)
        self.lost_weights.assign(_if(skipped, inputs.lost_weights, old))
        if inputs.known():
            nothing = ops.zeros((len(inputs.PARTS),), "int32")
            rows = _if(skipped, inputs.first_bad_rows, nothing)
            loss = _bits(ops.cast(ops.greater(loss, 0), "int32"))
            rows = ops.concatenate([rows, loss[None]])
            self._write(self.recent_inputs, row[:, None], rows[None, :])
        row = self._row(STEPS_CAPACITY, counts, skipped)
        self._write(self.recent_steps, row, counts[STEPS] + 1)

    def remember_loss(self, counts, rows, kinds):
        """Returns `recent_inputs` with the loss of the step recorded last.

        On JAX a step knows its loss only after the gradients are applied.

        Args:
            counts: Value of `counts`.
            rows: Value of `recent_inputs`.
            kinds: As `loss` of `remember`.
        """
        skipped = ops.greater(counts[CONSECUTIVE], 0)
        last = ops.subtract(counts[SKIPPED], 1) % CAPACITY
        row = ops.equal(ops.arange(CAPACITY, dtype="int32"), last)
        bits = _bits(ops.cast(ops.greater(kinds, 0), "int32"))
        loss = ops.where(ops.logical_and(row, skipped), bits, rows[:, -1])
        return ops.concatenate([rows[:, :-1], loss[:, None]], axis=1)

    @staticmethod
    def _row(capacity, counts, skipped):
        slot = counts[SKIPPED] % capacity
        row = ops.equal(ops.arange(capacity, dtype="int32"), slot)
        return row if skipped is True else ops.logical_and(row, skipped)

    def record(self, finite, norms, state):
        """Counts one attempted step.

        Args:
            finite: Boolean scalar. Whether the step was applied.
            norms: float32 `(n,)`. Unscaled gradient norms.
            state: The `LossScaleState` after the step.
        """
        self.gradient_norms.assign(norms)
        self.pending_scale.assign(state.pending_scale)
        counts = ops.convert_to_tensor(self.counts)
        skipped, consecutive = counts[SKIPPED], ops.zeros((), "int32")
        if finite is not True:
            bad = 1 - ops.cast(finite, "int32")
            skipped = skipped + bad
            consecutive = (counts[CONSECUTIVE] + 1) * bad
        self.counts.assign(
            ops.stack(
                [
                    ops.cast(value, "int32")
                    for value in (
                        state.steps,
                        skipped,
                        consecutive,
                        state.hysteresis_left,
                    )
                ]
            )
        )

    @staticmethod
    def _write(ring, row, value):
        ring.assign(ops.where(row, value, ops.convert_to_tensor(ring)))

    def read_counts(self):
        """Returns attempted, skipped and consecutive skipped steps as ints."""
        return tuple(int(c) for c in self._read(self.counts)[:HYSTERESIS])

    def read_by_path(self, name):
        """Returns `gradient_norms` or `overflows` as `{path: value}`."""
        values = self._read(getattr(self, name)).tolist()
        return dict(zip(self.paths, values, strict=True))

    def read_skipped(self):
        """Returns the numbers of the last 1,024 skipped steps, rising."""
        steps = self._read(self.recent_steps)
        return steps[self._slots(STEPS_CAPACITY, self.read_counts()[SKIPPED])]

    def read_recent(self):
        """Returns the last 32 `NonfiniteStep`s, oldest first."""
        steps = self.read_skipped()[-CAPACITY:]
        scales = self._read(self.recent_scales)
        flags = self._read(self.recent_flags)
        rows = self._read(self.recent_inputs)
        slots = self._slots(CAPACITY, self.read_counts()[SKIPPED])
        return [
            self._step(int(step), float(scales[i]), flags[i], rows[i])
            for step, i in zip(steps, slots, strict=True)
        ]

    def _step(self, step, scale, flags, rows):
        bad = [(p, f) for p, f in zip(self.paths, flags, strict=True) if f]
        return NonfiniteStep(
            step,
            scale,
            [path for path, _ in bad],
            {
                part: int(row) - 1
                for part, row in zip(inputs.PARTS, rows[:-1], strict=True)
                if row
            },
            {path: _kinds(flag) for path, flag in bad},
            _kinds(rows[-1]),
        )

    def read_kinds(self):
        """Returns in how many steps a gradient held each `NONFINITE_KINDS`."""
        return count_kinds(self._read(self.nonfinite_counts))

    @staticmethod
    def _slots(capacity, skipped):
        """Where a ring keeps the last of so many skipped steps, in order."""
        return np.arange(max(skipped - capacity, 0), skipped) % capacity

    def save_own_variables(self, store):
        """Writes the history beside the optimizer's own variables."""
        if self.paths is None:
            # What it has read and waits for, if anything.
            for name, values in self._unread.items():
                store[name] = values
            return
        values = {name: self._read(getattr(self, name)) for name in self._NAMES}
        for name in self._OFTEN_ZERO:
            if not values[name].any():
                del values[name]
        # They are below 16: the file need not be larger for the workers.
        values["recent_flags"] = values["recent_flags"].astype("uint8")
        # A step without its variables and scale is of no use to anybody later.
        last = self.read_skipped()[-CAPACITY:]
        values["recent_steps"] = self._ring(CAPACITY, last)
        for name, value in values.items():
            store[name] = value

    def load_own_variables(self, store):
        """Reads a history; a file of Keras' optimizer has none."""
        if self.paths is None:
            self._unread = copy_store(store)
            return
        if "counts" in store:
            for name in self._OFTEN_ZERO:
                variable = getattr(self, name)
                variable.assign(np.zeros(variable.shape, "int32"))
        for name in self._NAMES:
            variable = getattr(self, name)
            if name in store and store[name].shape == tuple(variable.shape):
                variable.assign(store[name])
        if "recent_steps" in store:
            slots = self._slots(CAPACITY, self.read_counts()[SKIPPED])
            steps = np.asarray(store["recent_steps"])[slots]
            self.recent_steps.assign(self._ring(STEPS_CAPACITY, steps))

    def _ring(self, capacity, last):
        """A ring of so many slots that holds the last skipped steps."""
        ring = np.zeros(capacity, "int32")
        slots = self._slots(capacity, self.read_counts()[SKIPPED])
        ring[slots[len(slots) - len(last) :]] = last
        return ring

    def _obj_type(self):
        return "Optimizer"

    @staticmethod
    def _read(variable):
        return active.step().read(variable)


def _if(skipped, compute, otherwise):
    if skipped is True:
        return compute()
    return ops.cond(skipped, compute, lambda: otherwise)


def _bits(kinds):
    return ops.sum(ops.multiply(kinds, _BITS), axis=-1)


def _kinds(bits):
    return [k for k, b in zip(NONFINITE_KINDS, _BITS, strict=True) if bits & b]


def copy_store(store) -> dict:
    """Returns what a weights store holds; it may be closed when needed."""
    return {name: store[name] for name in list(store.keys())}
