"""What the optimizer remembers of its steps, as variables of the step itself.

Nothing here needs the host: a compiled step, or many of them in one call,
keeps the record, and whoever looks later finds every non-finite step counted
and the last 32 of them in full.
"""

from typing import NamedTuple

from keras import ops
from keras.src.saving.keras_saveable import KerasSaveable

from keras_mixprec.backend import step as backend_step

CAPACITY = 32

# Columns of `counts`.
STEPS, SKIPPED, CONSECUTIVE, HYSTERESIS = range(4)


class NonfiniteStep(NamedTuple):
    """One skipped step.

    Attributes:
        step: Int. Its number among all attempted steps, counted from 1.
        scale: Float. The loss scale it ran with.
        variables: List of the paths of the variables whose gradient was not
            finite.
    """

    step: int
    scale: float
    variables: list


class StepHistory(KerasSaveable):
    """Counters, last gradient norms and a ring of recent non-finite steps."""

    _NAMES = (
        "counts",
        "pending_scale",
        "gradient_norms",
        "overflows",
        "recent_steps",
        "recent_scales",
        "recent_flags",
    )

    def __init__(self):
        self.paths = None
        self._unread = {}

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
        self.recent_steps = add_variable("recent_steps", (CAPACITY,), "int32")
        self.recent_scales = add_variable(
            "recent_scales", (CAPACITY,), "float32"
        )
        # Not "uint8": TensorFlow's workers cannot send each other those.
        self.recent_flags = add_variable(
            "recent_flags", (CAPACITY, count), "int32"
        )
        self.load_own_variables(self._unread)

    def record(self, finite, flags, norms, scale, state):
        """Records one attempted step.

        Args:
            finite: Boolean scalar. Whether the step was applied.
            flags: Int `(n,)`. 1 where a variable's gradient was not finite.
            norms: float32 `(n,)`. Unscaled gradient norms.
            scale: float32 scalar. The loss scale the step ran with.
            state: The `LossScaleState` after the step.
        """
        counts = ops.convert_to_tensor(self.counts)
        skipped = counts[SKIPPED]
        self.gradient_norms.assign(norms)
        self.pending_scale.assign(state.pending_scale)
        if finite is not True:
            self._remember(finite, flags, scale, skipped, state.steps)
            bad = 1 - ops.cast(finite, "int32")
            skipped = skipped + bad
            consecutive = (counts[CONSECUTIVE] + 1) * bad
        else:
            consecutive = ops.zeros((), "int32")
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

    def _remember(self, finite, flags, scale, slot, step):
        row = ops.equal(ops.arange(CAPACITY, dtype="int32"), slot % CAPACITY)
        row = ops.logical_and(row, ops.logical_not(finite))
        flags = ops.cast(flags, "int32")
        # A good step has no flag set, so this needs no condition.
        self.overflows.assign_add(flags)
        self._write(self.recent_steps, row, step)
        self._write(self.recent_scales, row, scale)
        self._write(self.recent_flags, row[:, None], flags[None, :])

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

    def read_recent(self):
        """Returns the recent `NonfiniteStep`s, oldest first."""
        steps = self._read(self.recent_steps)
        scales = self._read(self.recent_scales)
        flags = self._read(self.recent_flags)
        return [
            NonfiniteStep(
                int(steps[i]),
                float(scales[i]),
                [p for p, f in zip(self.paths, flags[i], strict=True) if f],
            )
            for i in steps.argsort(kind="stable")
            if steps[i] > 0
        ]

    def save_own_variables(self, store):
        """Writes the history beside the optimizer's own variables."""
        if self.paths is None:
            # What it has read and waits for, if anything.
            for name, values in self._unread.items():
                store[name] = values
            return
        for name in self._NAMES:
            values = self._read(getattr(self, name))
            # They are 0 or 1: the file need not be larger for the workers.
            flags = name == "recent_flags"
            store[name] = values.astype("uint8") if flags else values

    def load_own_variables(self, store):
        """Reads a history; a file of Keras' optimizer has none."""
        if self.paths is None:
            self._unread = copy_store(store)
            return
        for name in self._NAMES:
            variable = getattr(self, name)
            if name in store and store[name].shape == tuple(variable.shape):
                variable.assign(store[name])

    def _obj_type(self):
        return "Optimizer"

    @staticmethod
    def _read(variable):
        return backend_step.current().read(variable)


def copy_store(store) -> dict:
    """Returns what a weights store holds; it may be closed when needed."""
    return {name: store[name] for name in list(store.keys())}
