"""Records an optimizer's steps in variables.

A compiled step updates the record without the host, even if one call runs many
steps. The record counts every skipped step. It stores the last 1,024 steps that
were skipped or changed the loss scale, and details of the last 32 skipped
steps.
"""

from typing import NamedTuple

import numpy as np
from keras import ops

from keras_mixprec.backend import active
from keras_mixprec.formats import NONFINITE_KINDS, count_kinds
from keras_mixprec.keras_internals import KerasSaveable
from keras_mixprec.loss_scaling.inputs import PARTS
from keras_mixprec.loss_scaling.rules import namespace

# Number of entries in each ring buffer. At the default `update_freq`, the host
# reads the record 20 times in 1,024 steps. The host therefore misses no entry,
# even if every step is skipped.
DETAILS = 32
CHANGES = 1024

# Indices of the counters in the variable `StepHistory.counts`.
STEPS, SKIPPED, CONSECUTIVE, HYSTERESIS, CHANGED = range(5)

# The flag of a gradient has one bit for each of `NONFINITE_KINDS`. The lowest
# bit of a flag is set if the gradient did not pass the check for overflow.
_BITS = np.array([2, 4, 8], "int32")


class NonfiniteStep(NamedTuple):
    """One skipped step.

    Attributes:
        step: Int. The step's number among all attempted steps, counted from 1.
        scale: Float. The loss scale of the step.
        variables: List of the paths of variables with non-finite gradients.
        inputs: Dict from `"x"`, `"y"` or `"sample_weight"` to the first
            non-finite row in that part of the batch. Empty if all inputs are
            finite, or outside of a `fit` with a callback of this package.
        kinds: Dict from each path to a list of the non-finite kinds (`"inf"`,
            `"-inf"`, `"nan"`) that the scaled gradient held on any replica. The
            list is empty if the gradient was finite, but too large for its norm
            or its variable.
        loss: List of the non-finite kinds of the loss. Empty if the loss was
            finite, or outside of a `fit` with a callback of this package.
    """

    step: int
    scale: float
    variables: list
    inputs: dict = {}
    kinds: dict = {}
    loss: list = []


class ScaleChange(NamedTuple):
    """A skipped step, or a change of the scale by a step or by hand.

    Attributes:
        step: Int. The step's number among all attempted steps, counted from 1.
            If the scale was set between two steps, the number of the earlier
            step.
        skipped: Int. Number of skipped steps up to this step.
        was_skipped: Boolean. True if this step was skipped.
        before: Float. The loss scale of the step.
        after: Float. The loss scale after the step.
    """

    step: int
    skipped: int
    was_skipped: bool
    before: float
    after: float


class StepHistory(KerasSaveable):
    """Counters, the last gradient norms, and two ring buffers of steps."""

    def __init__(self):
        self.paths = None
        self._names = []
        self._unread = {}

    def build(self, add_variable, paths, state):
        """Creates the variables.

        Args:
            add_variable: Function `(name, shape, dtype, value=0)` that
                creates and tracks a variable of the optimizer.
            paths: List of the paths of the trainable variables.
            state: The initial `LossScaleState`.
        """
        self.paths, count = paths, len(paths)
        kinds, parts = len(NONFINITE_KINDS), len(PARTS)
        first = [0, 0, 0, int(state.hysteresis_left), 0]
        for name, *declared in (
            ("counts", (5,), "int32", first),
            ("pending_scale", (), "float32", float(state.pending_scale)),
            # `to_discard` is the number of micro-batches in the current
            # accumulation window that are still to be discarded.
            ("to_discard", (), "int32"),
            ("gradient_norms", (count,), "float32"),
            ("overflows", (count,), "int32"),
            ("nonfinite_counts", (kinds,), "int32"),
            ("changed_steps", (CHANGES, 3), "int32"),
            ("changed_scales", (CHANGES, 2), "float32"),
            # Store flags as int32, because TensorFlow's workers cannot send
            # uint8 to each other.
            ("recent_flags", (DETAILS, count), "int32"),
            # `guards/metric_guard.py` writes the variables for inputs, losses
            # and the epoch.
            ("recent_inputs", (DETAILS, parts + 1), "int32"),
            ("nonfinite_losses", (kinds,), "int32"),
            ("epoch", (), "int32"),
        ):
            self._names.append(name)
            setattr(self, name, add_variable(name, *declared))
        self.load_own_variables(self._unread)

    @property
    def variables(self) -> list:
        """All variables of the record."""
        return [getattr(self, name) for name in self._names]

    # Methods that record a train step, most of them inside a compiled step.

    def remember(self, skipped, flags, kinds):
        """Records which gradients of a skipped step were not finite.

        Call `remember` before `record`. A step that can branch calls `remember`
        only if the step is skipped, so other steps take no extra time.

        Args:
            skipped: `True`, or a boolean scalar. If false, nothing changes.
            flags: Int `(n,)`. 1 for each non-finite gradient, 0 for all other
                gradients.
            kinds: Float `(n, 3)`. Number of replicas on which the gradient held
                each of `NONFINITE_KINDS`. All are zero if the step is not
                skipped.
        """
        flags = ops.cast(flags, "int32")
        # All flags of a finite step are 0, so adding the flags needs no
        # condition.
        self.overflows.assign_add(flags)
        kinds = ops.cast(ops.greater(kinds, 0), "int32")
        self.nonfinite_counts.assign_add(ops.max(kinds, axis=0))
        place = ops.convert_to_tensor(self.counts)[SKIPPED]
        _write(self.recent_flags, place, skipped, flags + _bits(kinds))

    def remember_batch(self, skipped, rows, kinds):
        """Records non-finite inputs and losses of the last recorded step.

        Args:
            skipped: Boolean scalar. If false, nothing changes.
            rows: The result of `first_bad_rows`.
            kinds: Float `(3,)`. Number of replicas on which the loss was each
                of `NONFINITE_KINDS`.
        """
        kinds = _bits(ops.cast(ops.greater(kinds, 0), "int32"))
        place = ops.convert_to_tensor(self.counts)[SKIPPED] - 1
        values = ops.concatenate([rows, kinds[None]])
        _write(self.recent_inputs, place, skipped, values)

    def record(self, finite, norms, counts, before, after):
        """Records one attempted step.

        Args:
            finite: Boolean, or a boolean scalar tensor. False if the step was
                skipped.
            norms: float32 `(n,)`. Unscaled gradient norms.
            counts: Value of `self.counts`: a NumPy array if `finite` is a
                Python boolean, otherwise a tensor.
            before: The `LossScaleState` before the step.
            after: The `LossScaleState` after the step.
        """
        xp = namespace(finite)
        bad = xp.logical_not(finite)
        moved = xp.not_equal(after.scale, before.scale)
        changed = xp.where(xp.logical_or(bad, moved), np.int32(1), np.int32(0))
        bad = xp.where(bad, np.int32(1), np.int32(0))
        skipped = counts[SKIPPED] + bad
        steps = xp.stack([after.steps, skipped, bad])
        scales = xp.stack([before.scale, after.scale])
        # Write the ring buffers before `self.counts` gets its new value. On
        # torch, the old counts may share memory with the variable.
        if xp is ops or changed:
            self._note(counts, changed > 0, steps, scales)
        new = (
            after.steps,
            skipped,
            (counts[CONSECUTIVE] + 1) * bad,
            after.hysteresis_left,
            counts[CHANGED] + changed,
        )
        self.counts.assign(xp.stack(new))
        self.gradient_norms.assign(norms)
        self.pending_scale.assign(after.pending_scale)

    def note_scale(self, before: float, after: float):
        """Records a loss scale that is set between two steps."""
        counts = np.array(self._read(self.counts))
        steps = np.array([counts[STEPS], counts[SKIPPED], 0])
        self._note(counts, True, steps, np.array([before, after], "float32"))
        counts[CHANGED] += 1
        self.counts.assign(counts)
        self.pending_scale.assign(after)

    def _note(self, counts, changed, steps, scales):
        _write(self.changed_steps, counts[CHANGED], changed, steps)
        _write(self.changed_scales, counts[CHANGED], changed, scales)

    # Methods that read the record on the host. Before `build`, the record is
    # empty.

    def read_counts(self):
        """Returns the values of `counts` as ints."""
        if self.paths is None:
            return (0,) * (CHANGED + 1)
        return tuple(self._read(self.counts).tolist())

    def read_by_path(self, name):
        """Returns `gradient_norms` or `overflows` as `{path: value}`."""
        if self.paths is None:
            return {}
        values = self._read(getattr(self, name)).tolist()
        return dict(zip(self.paths, values, strict=True))

    def read_by_kind(self, name):
        """Returns `nonfinite_counts` or `nonfinite_losses` by kind."""
        known = [] if self.paths is None else [self._read(getattr(self, name))]
        return count_kinds(*known)

    def read_recent(self):
        """Returns the last 32 `NonfiniteStep`s, oldest first."""
        changes = [c for c in self.read_changes() if c.was_skipped][-DETAILS:]
        if not changes:
            return []
        flags = self._read(self.recent_flags)
        rows = self._read(self.recent_inputs).tolist()
        found = []
        for change in changes:
            place = (change.skipped - 1) % DETAILS
            bad = {
                p: f
                for p, f in zip(self.paths, flags[place].tolist(), strict=True)
                if f
            }
            *firsts, loss = rows[place]
            found.append(
                NonfiniteStep(
                    change.step,
                    change.before,
                    list(bad),
                    {p: n - 1 for p, n in zip(PARTS, firsts, strict=True) if n},
                    {path: _kinds(flag) for path, flag in bad.items()},
                    _kinds(loss),
                )
            )
        return found

    def read_changes(self, count: int = CHANGES) -> list[ScaleChange]:
        """Returns the last `ScaleChange`s, oldest first.

        Args:
            count: Int. Maximum number of changes to return. Defaults to all
                stored changes.
        """
        changed = self.read_counts()[CHANGED]
        numbers = range(max(changed - min(count, CHANGES), 0), changed)
        if not numbers:
            return []
        slots = np.array(numbers) % CHANGES
        steps = self._read(self.changed_steps)[slots].tolist()
        scales = self._read(self.changed_scales)[slots].tolist()
        return [
            ScaleChange(step, skipped, bool(bad), *scale)
            for (step, skipped, bad), scale in zip(steps, scales, strict=True)
        ]

    def save_own_variables(self, store):
        """Writes the history next to the optimizer's own variables.

        Variables that are all zero are left out, because each would take 0.5 kB
        in HDF5.
        """
        if self.paths is None:
            # If a file was loaded before `build`, write the content of the file
            # back unchanged.
            for name, values in self._unread.items():
                store[name] = values
        for name, variable in zip(self._names, self.variables, strict=True):
            if (values := self._read(variable)).any():
                store[name] = values

    def load_own_variables(self, store):
        """Loads the history. A file from Keras' optimizer has no history."""
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


def _write(ring, number, condition, row):
    """Writes entry `number` of a ring buffer if `condition` is true."""
    places = ops.arange(ring.shape[0], dtype="int32")
    chosen = ops.equal(places, number % ring.shape[0])
    chosen = ops.logical_and(chosen, condition)[:, None]
    ring.assign(ops.where(chosen, row[None, :], ops.convert_to_tensor(ring)))


def _bits(kinds):
    return ops.sum(ops.multiply(kinds, _BITS), axis=-1)


def _kinds(bits):
    return [k for k, b in zip(NONFINITE_KINDS, _BITS, strict=True) if bits & b]


def copy_store(store) -> dict:
    """Copies a weights store, because Keras may close the store later."""
    return {name: store[name] for name in list(store.keys())}
