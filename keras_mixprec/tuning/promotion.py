"""Detects divergence after a demotion, and returns layers to 16 bits."""

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

# A demotion is on probation for this many steps. A later divergence has a
# different cause.
_STEPS = 500


class Probation:
    """Compares a model with its state before a demotion.

    In float16, an outlier overflows, and its step is skipped. In float32, the
    gradient of the outlier is finite and may ruin the weights. Each worker
    compares its own model.

    Args:
        watch: The `Watch`, before the layers are demoted.
        step: Int. The step of the demotion.
        gap: Int. Steps until the first comparison.
        batch: The batch whose loss is compared, as `train_step` takes it, or
            `None`. It should not be an outlier.

    Attributes:
        step: Int. The step of the demotion.
        scale_bits: Float. log2 of the loss scale before the demotion.
        paths: Set of the paths of the demoted layers.

    Raises:
        NotImplementedError: If several processes hold parts of a weight, so
            that no process can copy the weight.
    """

    def __init__(self, watch, step: int, gap: int, batch):
        self.step = step
        self.scale_bits = watch.counters.scale_bits()
        self.paths: set[str] = set()
        self._watch = watch
        self._gap = max(gap, 1)
        self._batch = batch
        # Read the variables of `watch.model`, which are up to date. During a
        # step on JAX, `synchronized_model` would restore older values.
        with active.processes().single_process(watch.model):
            self._state = State.of(watch.model)
        self._before = self._course(watch.model)

    @property
    def due(self) -> int:
        """The step of the next comparison."""
        return self.step + self._gap

    @property
    def is_over(self) -> bool:
        """Returns whether the probation has ended."""
        return self._gap > _STEPS

    def divergence(self) -> str | None:
        """Compares the model, and doubles the time to the next comparison.

        Returns:
            A clause about the growth, or `None` if training has not diverged.
        """
        self._gap *= 2
        before = self._before
        now = self._course(self._watch.synchronized_model())
        start = self._watch.examiner.schedule.start
        # If the loss is nearly 0, a normal step may multiply the loss by 1000.
        # In a divergence, the loss also exceeds its value before training.
        known = start and math.isfinite(start.loss)
        if not (now.left(before) and now.left(start if known else before)):
            return None
        what, then, grown = "float32 loss of one batch", before.loss, now.loss
        # Weights that start near 0 grow by a large factor in any training, so a
        # weight below 1 counts as 1 in the comparison.
        if now.weight >= thresholds.DIVERGED * max(before.weight, 1.0):
            what, then, grown = "largest weight", before.weight, now.weight
        return f"{what} grew from {then:.3g} to {grown:.3g}"

    def _course(self, model):
        loss = self._watch.examiner.exact_loss(self._batch)
        with active.processes().single_process(model):
            return Course.of(model, loss)

    def restore(self):
        """Restores weights and optimizer state from before the demotion."""
        self._state.put_back()


def layers_that_may_return(watch, repairs, paths, batches, step: int) -> set:
    """Returns the demoted layers that can return to 16 bits together.

    Args:
        watch: The `Watch`.
        repairs: `Repairs` of the model.
        paths: Paths of demoted layers.
        batches: List of batches to try the layers on, as `train_step` takes
            them.
        step: Int.
    """
    found = set(paths)
    # When the layers that fail in the first round stay demoted, a different
    # layer may fail, so try a second round.
    for _ in range(2):
        found -= _at_fault(watch, repairs, found, batches, step)
    with temporary_policies(repairs.as_built(found)):
        found -= repairs.paths_of(isolated_layers(watch.model))
    at_fault = _at_fault(watch, repairs, found, batches, step)
    repairs.tried(set(paths) - found, step)
    return set() if at_fault else found


def _at_fault(watch, repairs, paths, batches, step):
    """Returns the layers that fail in their original dtype on any worker."""
    if not paths:
        return set()
    found = set(paths)
    try:
        found = _at_fault_here(watch.model, repairs, paths, batches, step)
    # Do not raise the error, because the other workers wait for this worker's
    # result.
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
            # In 16 bits, a layer with little headroom would soon be demoted
            # again, so the layer counts as failing.
            low = {entry.path: entry.layer for entry in low_layers(model)}
            layers += [
                low[path]
                for path, bits in found.headroom.items()
                if path in low and bits < thresholds.BITS_ABOVE
            ]
    return repairs.paths_of(layers)
