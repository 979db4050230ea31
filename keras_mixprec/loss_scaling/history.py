"""The record of an optimizer's steps, in variables of the step itself.

The record needs no host: a compiled step, or many of them in one call, keeps
it. It counts every non-finite step, holds the last 32 of them in full, and the
last 1,024 steps that were skipped or changed the loss scale.
"""

from typing import Any, NamedTuple

import numpy as np
from keras import ops

from keras_mixprec.backend import active
from keras_mixprec.formats import NONFINITE_KINDS, count_kinds
from keras_mixprec.keras_internals import KerasSaveable
from keras_mixprec.loss_scaling import current_step as inputs
from keras_mixprec.loss_scaling.rules import namespace

# The ring of skipped steps, kept in full, and the ring of steps with only their
# loss scale. 1,024 last for 20 times the default `update_freq` even if every
# step is skipped.
CAPACITY = 32
CHANGES = 1024

# Columns of `counts`.
STEPS, SKIPPED, CONSECUTIVE, HYSTERESIS, CHANGED = range(5)

# The bit of each of `NONFINITE_KINDS` in the flag of a gradient in the ring.
# The first bit says that the gradient does not fit the variable's dtype.
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
        kinds: Dict from these paths to a list of `"inf"`, `"-inf"` and `"nan"`,
            whichever the gradient held on any replica before the loss scale was
            divided out. Empty where it was finite but its norm, or what the
            variable's dtype holds, was exceeded.
        loss: The same list for the loss. It is empty if the loss was finite or
            is not known, as outside of `fit`, without a callback of this
            package, and in a custom `train_step`.
    """

    step: int
    scale: float
    variables: list
    inputs: dict = {}
    kinds: dict = {}
    loss: list = []


class ScaleChange(NamedTuple):
    """A step that was skipped or changed the scale, or a scale that is set.

    Attributes:
        step: Int. Its number among all attempted steps, counted from 1. For a
            scale that is set between two steps, the number of the earlier one.
        skipped: Int. Steps skipped so far.
        was_skipped: Boolean, whether this one was.
        before: Float. The loss scale it ran with.
        after: Float. The loss scale from then on.
    """

    step: int
    skipped: int
    was_skipped: bool
    before: float
    after: float


class _Declared(NamedTuple):
    """A variable of the record.

    Attributes:
        name: String. The attribute that holds it.
        shape: Tuple.
        dtype: String.
        initial: Number or list. Its first value, also for a file that lacks the
            variable.
    """

    name: str
    shape: tuple
    dtype: str
    initial: Any = 0


def _declared(count, state, late, windows):
    """The variables of the record, all of them saved."""
    hysteresis_left = int(state.hysteresis_left)
    parts, kinds = len(inputs.PARTS), len(NONFINITE_KINDS)
    # Micro-batches of a window that are still to be discarded.
    optional = [_Declared("to_discard", (), "int32")] if windows else []
    if late:
        pending = float(state.pending_scale)
        optional.append(_Declared("pending_scale", (), "float32", pending))
    return [
        _Declared("counts", (5,), "int32", [0, 0, 0, hysteresis_left, 0]),
        _Declared("gradient_norms", (count,), "float32"),
        _Declared("overflows", (count,), "int32"),
        _Declared("nonfinite_counts", (kinds,), "int32"),
        _Declared("recent_steps", (CAPACITY,), "int32"),
        _Declared("recent_scales", (CAPACITY,), "float32"),
        # TensorFlow's workers cannot send each other uint8.
        _Declared("recent_flags", (CAPACITY, count), "int32"),
        _Declared("recent_inputs", (CAPACITY, parts + 1), "int32"),
        # 1 if a weight was not finite at the last skipped step.
        _Declared("lost_weights", (), "int32"),
        # The guard of metrics counts losses of each kind, and notes that the
        # last epoch had no finite loss.
        _Declared("nonfinite_losses", (kinds,), "int32"),
        _Declared("epoch_lost", (), "int32"),
        _Declared("changed_steps", (CHANGES, 3), "int32"),
        _Declared("changed_scales", (CHANGES, 2), "float32"),
        *optional,
    ]


class StepHistory(KerasSaveable):
    """Counters, last gradient norms, and rings of skipped and changed steps."""

    # Only for a rule that publishes a scale late.
    pending_scale: Any = None

    def __init__(self):
        self.paths = None
        self._names = []
        self._unread = {}

    def build(self, add_variable, paths, rule, windows):
        """Creates the variables.

        Args:
            add_variable: Function `(name, shape, dtype, value=0)` that
                creates and tracks a variable of the optimizer.
            paths: List of the paths of the trainable variables.
            rule: The update rule.
            windows: Boolean, whether windows of micro-batches are discarded.
        """
        self.paths = paths
        late, state = rule.publishes_late, rule.initial_state()
        for declared in _declared(len(paths), state, late, windows):
            self._names.append(declared.name)
            setattr(self, declared.name, add_variable(*declared))
        self.load_own_variables(self._unread)

    @property
    def variables(self) -> list:
        """All variables of the record."""
        return [getattr(self, name) for name in self._names]

    def remember(self, skipped, flags, kinds, scale, loss):
        """Writes down which variables made a step that is skipped fail.

        Comes before `record`. A step that can branch calls it only if it is
        skipped, so that it costs a good step nothing.

        Args:
            skipped: `True`, or a boolean scalar: a step that is not skipped
                changes nothing.
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
        row = _row(CAPACITY, counts[SKIPPED], skipped)
        _write(self.recent_steps, row, counts[STEPS] + 1)
        _write(self.recent_scales, row, scale)
        _write(self.recent_flags, row[:, None], flags[None, :])
        old = ops.convert_to_tensor(self.lost_weights)
        self.lost_weights.assign(_if(skipped, inputs.lost_weights, old))
        if inputs.known():
            nothing = ops.zeros((len(inputs.PARTS),), "int32")
            rows = _if(skipped, inputs.first_bad_rows, nothing)
            loss = _bits(ops.cast(ops.greater(loss, 0), "int32"))
            rows = ops.concatenate([rows, loss[None]])
            _write(self.recent_inputs, row[:, None], rows[None, :])

    def remember_loss(self, kinds):
        """Writes down the loss of the step recorded last.

        On JAX a step knows its loss only after the gradients are applied.

        Args:
            kinds: As `loss` of `remember`.
        """
        counts = ops.convert_to_tensor(self.counts)
        skipped = ops.greater(counts[CONSECUTIVE], 0)
        row = _row(CAPACITY, counts[SKIPPED] - 1, skipped)
        bits = _bits(ops.cast(ops.greater(kinds, 0), "int32"))
        rows = ops.convert_to_tensor(self.recent_inputs)
        loss = ops.where(row, bits, rows[:, -1])
        new = ops.concatenate([rows[:, :-1], loss[:, None]], axis=1)
        self.recent_inputs.assign(new)

    def record(self, finite, norms, counts, before, after):
        """Counts one attempted step.

        Args:
            finite: Boolean, or a boolean scalar tensor. Whether the step was
                applied.
            norms: float32 `(n,)`. Unscaled gradient norms.
            counts: Value of `counts`, on the host if `finite` is.
            before: The `LossScaleState` that the step ran with.
            after: The `LossScaleState` after it.
        """
        xp = namespace(finite)
        bad = xp.logical_not(finite)
        moved = xp.not_equal(after.scale, before.scale)
        changed = xp.where(xp.logical_or(bad, moved), np.int32(1), np.int32(0))
        bad = xp.where(bad, np.int32(1), np.int32(0))
        skipped = counts[SKIPPED] + bad
        steps = xp.stack([after.steps, skipped, bad])
        scales = xp.stack([before.scale, after.scale])
        # Before counts are written: on torch those read are the same memory.
        if xp is ops:
            self._note(counts, ops.greater(changed, 0), steps, scales)
        elif changed:
            self._note(counts, True, steps, scales)
        new = (
            after.steps,
            skipped,
            (counts[CONSECUTIVE] + 1) * bad,
            after.hysteresis_left,
            counts[CHANGED] + changed,
        )
        self.counts.assign(xp.stack(new))
        self.gradient_norms.assign(norms)
        if self.pending_scale is not None:
            self.pending_scale.assign(after.pending_scale)

    def note_scale(self, before: float, after: float):
        """Writes down that the loss scale is set between two steps.

        Args:
            before: Float. The scale until now.
            after: Float. The scale from now on.
        """
        # A copy: on torch what is read is the variable's own memory.
        counts = np.array(self._read(self.counts))
        steps = np.array([counts[STEPS], counts[SKIPPED], 0])
        self._note(counts, True, steps, np.array([before, after], "float32"))
        counts[CHANGED] += 1
        self.counts.assign(counts)

    def _note(self, counts, changed, steps, scales):
        row = _row(CHANGES, counts[CHANGED], changed)[:, None]
        _write(self.changed_steps, row, steps[None, :])
        _write(self.changed_scales, row, scales[None, :])

    def read_counts(self):
        """Returns what `counts` holds, as ints; zeros if it is not built."""
        if self.paths is None:
            return (0,) * (CHANGED + 1)
        return tuple(self._read(self.counts).tolist())

    def read_by_path(self, name):
        """Returns `gradient_norms` or `overflows` as `{path: value}`."""
        values = self._read(getattr(self, name)).tolist()
        return dict(zip(self.paths, values, strict=True))

    def read_recent(self):
        """Returns the last 32 `NonfiniteStep`s, oldest first."""
        read = [
            self._read(variable).tolist()
            for variable in (
                self.recent_steps,
                self.recent_scales,
                self.recent_flags,
                self.recent_inputs,
            )
        ]
        slots = _slots(CAPACITY, self.read_counts()[SKIPPED])
        return [self._step(*(values[i] for values in read)) for i in slots]

    def _step(self, step, scale, flags, rows):
        bad = {p: f for p, f in zip(self.paths, flags, strict=True) if f}
        *firsts, loss = rows
        return NonfiniteStep(
            step,
            scale,
            list(bad),
            {
                part: first - 1
                for part, first in zip(inputs.PARTS, firsts, strict=True)
                if first
            },
            {path: _kinds(flag) for path, flag in bad.items()},
            _kinds(loss),
        )

    def read_changes(self, count: int = CHANGES) -> list[ScaleChange]:
        """Returns the last `ScaleChange`s that are kept, oldest first.

        Args:
            count: Int. How many. Defaults to all.
        """
        if not count:
            return []
        slots = _slots(CHANGES, self.read_counts()[CHANGED])[-count:]
        steps = self._read(self.changed_steps)[slots].tolist()
        scales = self._read(self.changed_scales)[slots].tolist()
        return [
            ScaleChange(step, skipped, bool(bad), *scale)
            for (step, skipped, bad), scale in zip(steps, scales, strict=True)
        ]

    def read_kinds(self, name):
        """Returns `nonfinite_counts` or `nonfinite_losses` by kind."""
        return count_kinds(self._read(getattr(self, name)))

    def save_own_variables(self, store):
        """Writes the history next to the optimizer's own variables.

        It leaves out zeros, for which HDF5 takes 0.5 kB a variable.
        """
        if self.paths is None:
            # A file that was read before `build`.
            for name, values in self._unread.items():
                store[name] = values
        for name in self._names:
            values = self._read(getattr(self, name))
            if name == "recent_flags":
                # Flags are below 16. As uint8 they take a quarter of the space.
                values = values.astype("uint8")
            if values.any():
                store[name] = values

    def load_own_variables(self, store):
        """Reads a history; a file of Keras' optimizer has none."""
        if self.paths is None:
            self._unread = copy_store(store)
            return
        for name in self._names if "counts" in store else ():
            variable = getattr(self, name)
            shape = tuple(variable.shape)
            known = name in store and store[name].shape == shape
            variable.assign(store[name] if known else np.zeros(shape))

    def _obj_type(self):
        return "Optimizer"

    @staticmethod
    def _read(variable):
        return active.step().read(variable)


def _row(capacity, number, condition):
    """Marks where a ring keeps what is written as the number-th."""
    row = ops.equal(ops.arange(capacity, dtype="int32"), number % capacity)
    return row if condition is True else ops.logical_and(row, condition)


def _write(ring, row, value):
    ring.assign(ops.where(row, value, ops.convert_to_tensor(ring)))


def _slots(capacity, count):
    """The places of a ring's entries, the oldest first."""
    return np.arange(max(count - capacity, 0), count) % capacity


def _if(skipped, compute, otherwise):
    if skipped is True:
        return compute()
    # Another function each time: for one that it knows JAX takes the trace that
    # it knows, of another model's weights.
    return ops.cond(skipped, lambda: compute(), lambda: otherwise)


def _bits(kinds):
    return ops.sum(ops.multiply(kinds, _BITS), axis=-1)


def _kinds(bits):
    return [k for k, b in zip(NONFINITE_KINDS, _BITS, strict=True) if bits & b]


def copy_store(store) -> dict:
    """Returns what a weights store holds; it may be closed when needed."""
    return {name: store[name] for name in list(store.keys())}
