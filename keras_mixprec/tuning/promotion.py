"""Does a demotion help training, and which layers may return to 16 bits?"""

import math

import keras
import numpy as np

from keras_mixprec.backend import active
from keras_mixprec.backend.common import any_worker
from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.criterion import largest, nonfinite
from keras_mixprec.diagnosis.culprit import low_layers
from keras_mixprec.diagnosis.examination import examine
from keras_mixprec.numerics.arrays import to_array
from keras_mixprec.numerics.layer_hooks import temporary_policies
from keras_mixprec.numerics.rehearsal import State
from keras_mixprec.policies.casts import isolated_layers

# Weights and loss are compared when the cooldown is over, and then after twice
# as many steps as the time before, up to so many steps after a demotion.
_STEPS = 500


def _growth(what, before, now, least=0.0):
    """Returns a clause on growth that training does not need, or `None`.

    The limit is a multiple of `before`, or of `least` if that is larger.
    """
    limit = thresholds.DIVERGED * max(abs(before), least)
    if not math.isfinite(before) or now <= limit:
        return None
    return f"{what} grew from {before:.3g} to {now:.3g}"


class Probation:
    """Compares a model with what it was when layers were demoted.

    An outlier that overflows float16 is skipped with its step; in float32 its
    gradient is finite and may throw the weights anywhere, and where these are
    bounded the loss. Each of several workers compares what it has.

    Args:
        watch: The `Watch`, before the layers are demoted.
        step: Int. The step of the demotion.
        gap: Int. Steps until weights are compared first.
        batch: The batch whose loss is compared, as `train_step` takes it, or
            `None`. It should not be an outlier.

    Attributes:
        step: Int. As given.
        scale_bits: Float. The loss scale in use, as a power of two.
        paths: Set of the paths of the layers that were demoted since.

    Raises:
        NotImplementedError: If a weight is spread over several processes, so
            that none can copy it.
    """

    def __init__(self, watch, step: int, gap: int, batch):
        # The model's variables are up to date here. `synchronized_model` would
        # not know about a step that is under way.
        model = watch.model
        self.step = step
        self.scale_bits = watch.counters.scale_bits()
        self.paths = set()
        self._watch = watch
        self._gap = max(gap, 1)
        self._suspected = None
        self._batch = batch
        with active.processes().single_process(model):
            self._weight = _largest_weight(model)
            self._state = State.of(model)
        self._loss = watch.examiner.exact_loss(batch)

    @property
    def due(self) -> int:
        """The step of the next comparison."""
        return self.step + self._gap

    @property
    def is_over(self) -> bool:
        """Returns whether what comes now has another cause."""
        return self._gap > _STEPS

    def divergence(self, step: int) -> str | None:
        """Compares weights and loss; the next time is twice as far away.

        Args:
            step: Int.

        Returns:
            A clause on the growth, `None` if training has not diverged.
        """
        self._gap *= 2
        model = self._watch.synchronized_model()
        with active.processes().single_process(model):
            now = _largest_weight(model)
        # Weights that start at 0 always grow, so compare with at least 1.
        grown = _growth("largest weight", self._weight, now, least=1.0)
        return grown or self._loss_divergence()

    def _loss_divergence(self):
        examiner = self._watch.examiner
        if not math.isfinite(self._loss):
            return None
        now = examiner.exact_loss(self._batch)
        # A loss of one batch that is nearly 0 may grow a thousandfold in the
        # next step, but not beyond its value before any training.
        start = examiner.schedule.start
        least = abs(start.loss) if start else 0.0
        grown = _growth("float32 loss of one batch", self._loss, now, least)
        if grown is None:
            return None
        # A loss that was nearly 0 by chance before any training may grow a
        # hundredfold in ten steps. It falls again if training is sound.
        before, self._suspected = self._suspected, now
        falls = before is None or now < before / 2
        return None if math.isfinite(now) and falls else grown

    def restore(self):
        """Gives weights and optimizer state the values of the demotion."""
        self._state.put_back()


def _largest_weight(model):
    weights = [to_array(v.value) for v in model.trainable_variables]
    return np.inf if nonfinite(weights) else largest(weights)


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
    # A layer may be right beside others and wrong alone, so this is tried
    # twice.
    for _ in range(2):
        found -= _at_fault(watch, repairs, found, batches, step)
    with temporary_policies(repairs.as_built(found)):
        found -= repairs.paths_of(isolated_layers(watch.model))
    at_fault = _at_fault(watch, repairs, found, batches, step)
    repairs.tried(set(paths) - found, step)
    return set() if at_fault else found


def _at_fault(watch, repairs, paths, batches, step):
    """Which of the layers are at fault as they were built, anywhere."""
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
            # One that was demoted for its growth would be so again.
            low = {entry.path: entry.layer for entry in low_layers(model)}
            layers += [
                low[path]
                for path, bits in found.headroom.items()
                if path in low and bits < thresholds.BITS_ABOVE
            ]
    return repairs.paths_of(layers)
