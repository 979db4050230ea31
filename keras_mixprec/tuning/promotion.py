"""Compares a model after a demotion, and returns layers to 16 bits."""

import math

import keras

from keras_mixprec.backend import active
from keras_mixprec.backend.common import any_worker
from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.causes import Course
from keras_mixprec.diagnosis.culprit import low_layers
from keras_mixprec.diagnosis.examination import examine
from keras_mixprec.numerics.layer_hooks import temporary_policies
from keras_mixprec.numerics.rehearsal import State
from keras_mixprec.policies.casts import isolated_layers

# A model is compared when the cooldown is over, and then after twice as many
# steps each time, up to this many steps after a demotion.
_STEPS = 500


class Probation:
    """Compares a model with its state before layers were demoted.

    float16 skips the step of an outlier that overflows. In float32 its gradient
    is finite and may ruin the weights. Each worker compares its own model.

    Args:
        watch: The `Watch`, before the layers are demoted.
        step: Int. The step of the demotion.
        gap: Int. Steps until the first comparison.
        batch: The batch whose loss is compared, as `train_step` takes it, or
            `None`. It should not be an outlier.

    Attributes:
        step: Int. As given.
        scale_bits: Float. The loss scale in use, as a power of two.
        paths: Set of the paths of the layers that were demoted since.

    Raises:
        NotImplementedError: If no process can copy a weight, because several
            processes hold parts of it.
    """

    def __init__(self, watch, step: int, gap: int, batch):
        self.step = step
        self.scale_bits = watch.counters.scale_bits()
        self.paths: set[str] = set()
        self._watch = watch
        self._gap = max(gap, 1)
        self._batch = batch
        # The variables are up to date here. `synchronized_model` would not
        # know about a step that is under way.
        with active.processes().single_process(watch.model):
            self._state = State.of(watch.model)
        self._before = self._course(watch.model)

    @property
    def due(self) -> int:
        """The step of the next comparison."""
        return self.step + self._gap

    @property
    def is_over(self) -> bool:
        """Returns whether a later divergence has another cause."""
        return self._gap > _STEPS

    def divergence(self) -> str | None:
        """Compares the model; the next time is twice as far away.

        Returns:
            A clause on the growth, `None` if training has not diverged.
        """
        self._gap *= 2
        before = self._before
        now = self._course(self._watch.synchronized_model())
        start = self._watch.examiner.schedule.start
        # A loss of one batch that is nearly 0 may grow a thousandfold in the
        # next step, but not beyond its value before any training.
        known = start and math.isfinite(start.loss)
        if not (now.left(before) and now.left(start if known else before)):
            return None
        what, then, grown = "float32 loss of one batch", before.loss, now.loss
        # Weights that start near 0 always grow.
        if now.weight >= thresholds.DIVERGED * max(before.weight, 1.0):
            what, then, grown = "largest weight", before.weight, now.weight
        return f"{what} grew from {then:.3g} to {grown:.3g}"

    def _course(self, model):
        loss = self._watch.examiner.exact_loss(self._batch)
        with active.processes().single_process(model):
            return Course.of(model, loss)

    def restore(self):
        """Gives weights and optimizer state the values of the demotion."""
        self._state.put_back()


def layers_that_may_return(watch, repairs, paths, batches, step: int) -> set:
    """Returns those demoted layers that could return to 16 bits together.

    Args:
        watch: The `Watch`.
        repairs: `Repairs` of the model.
        paths: Paths of demoted layers.
        batches: List of batches to try them on, as `train_step` takes them.
        step: Int.
    """
    found = set(paths)
    # A layer may be right beside others and wrong alone, so there are two
    # rounds.
    for _ in range(2):
        found -= _at_fault(watch, repairs, found, batches, step)
    with temporary_policies(repairs.as_built(found)):
        found -= repairs.paths_of(isolated_layers(watch.model))
    at_fault = _at_fault(watch, repairs, found, batches, step)
    repairs.tried(set(paths) - found, step)
    return set() if at_fault else found


def _at_fault(watch, repairs, paths, batches, step):
    """Returns the layers at fault as built, on any worker."""
    if not paths:
        return set()
    found = set(paths)
    try:
        found = _at_fault_here(watch.model, repairs, paths, batches, step)
    # The other workers wait for this one.
    except Exception as error:
        watch.examiner.give_up(error)
    paths = sorted(paths)
    flags = any_worker(watch.model, [p in found for p in paths])
    return {p for p, flag in zip(paths, flags, strict=True) if flag}


def _at_fault_here(model, repairs, paths, batches, step):
    layers = []
    with temporary_policies(repairs.as_built(paths)):
        for batch in batches:
            parts = keras.utils.unpack_x_y_sample_weight(batch)
            found = examine(model, *parts, step=step)
            for finding in found.findings:
                layers += finding.layers
            # A layer with little headroom would soon be demoted again.
            low = {entry.path: entry.layer for entry in low_layers(model)}
            layers += [
                low[path]
                for path, bits in found.headroom.items()
                if path in low and bits < thresholds.BITS_ABOVE
            ]
    return repairs.paths_of(layers)
