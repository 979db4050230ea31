"""Decides when to audit a model."""

import dataclasses
import math
import weakref
import zlib
from typing import Any

from keras_mixprec.backend import active
from keras_mixprec.diagnosis.causes import Course
from keras_mixprec.keras_internals import flat_layers, loss_tracker
from keras_mixprec.monitoring.forecasts import AuditForecast

# A model is audited before the first step, at steps 16 and 48, and then each
# time the step count has grown by a factor of 4. Activations grow fastest early
# on: the norms in a T5 model can overflow by step 16 without a skipped step.
# Faults that skip no step are rare later.
_AUDITS = 16, 48
_AUDITS_GROW = 4

# The maximum number of audits that are moved forward. Each such audit halves
# the number of steps to a predicted overflow, so the eighth audit is within
# 1/256 of the first distance.
_HURRIES = 8

# A checksum of 8 small weights shows whether the user has set new weights
# between two calls to `fit`. Comparing all weights would take as long as a
# step.
_COMPARED, _ELEMENTS = 8, 2**14

_SCHEDULES = weakref.WeakKeyDictionary()


@dataclasses.dataclass
class AuditSchedule:
    """Decides when to audit a model, and keeps the result of the last audit.

    A schedule lasts over several `fit`s. It ends if the model is compiled
    again, or if its dtypes or weights are set between two `fit`s.

    Attributes:
        steps: Int. Steps taken in earlier `fit`s with this schedule.
        start: `Course` of the model before its first step, or `None` if it is
            not known yet.
        errors: Dict, as in `Examination`, of the last diagnosis.
        all_repaired: Boolean, whether every fault of the last diagnosis is
            repaired. If not, the next `fit` starts a new schedule.
        cost: Float. Seconds that the last diagnosis took, or `None`.
        forecast: `AuditForecast` from the headroom at each audit.
        scale_use_known: Boolean, whether a diagnosis has checked how the
            model's step uses the loss scale.
    """

    steps: int = 0
    start: Any = None
    errors: dict = dataclasses.field(default_factory=dict)
    all_repaired: bool = True
    cost: float | None = None
    forecast: AuditForecast = dataclasses.field(default_factory=AuditForecast)
    scale_use_known: bool = False
    _audits: int = 0
    _next: int = 0
    _last: int = 0
    _hurries: int = 0
    _compared: int = 0
    _identity: tuple | None = None

    @property
    def is_new(self) -> bool:
        """Returns whether no audit has been made yet."""
        return not self._audits

    @property
    def is_overhead(self) -> bool:
        """Returns whether the next audit counts as overhead."""
        return self._audits > len(_AUDITS)

    def is_comparison_due(self, taken: int, first: float) -> bool:
        """Returns whether a run without audits must be compared with float32.

        Args:
            taken: Int. Steps taken in this `fit`.
            first: Float. Steps before the first comparison. The step count
                doubles between later comparisons.
        """
        return self.steps + taken >= max(first, 2 * self._compared)

    def compare(self, taken: int):
        """Records that the run is compared with float32 now.

        Args:
            taken: Int. Steps taken in this `fit`.
        """
        self._compared = self.steps + taken

    def begin(self, model):
        """Records the state before the first step, once.

        Args:
            model: The `keras.Model`, with variables that are synchronized.
        """
        if self.start is None:
            self.start = Course.of(model, math.nan)

    def note_first_loss(self, sums: tuple | None):
        """Records the loss of the first step, unless a loss is known already.

        Args:
            sums: Tuple of the sum of losses and the sum of their weights, or
                `None`.
        """
        if self.start and sums and sums[1] and math.isnan(self.start.loss):
            self.start = self.start._replace(loss=sums[0] / sums[1])

    def took(self, seconds: float):
        """Records how long a diagnosis took."""
        self.cost = seconds

    def examine_scale_use(self):
        """Records that the step's use of the loss scale is checked now."""
        self.scale_use_known = True

    def repair(self, is_done: bool):
        """Records whether every fault found is repaired now."""
        self.all_repaired = is_done

    def steps_left(self, taken: int) -> int:
        """Returns the number of steps until the next audit.

        Args:
            taken: Int. Steps taken in this `fit`.
        """
        return self._next - self.steps - taken

    def audit(self, taken: int):
        """Records that an audit is made now.

        Args:
            taken: Int. Steps taken in this `fit`.
        """
        steps = self.steps + taken
        later = [date for date in _AUDITS if date > steps]
        self._next = later[0] if later else _AUDITS_GROW * steps
        self._audits += 1
        self._last = steps

    def hurry(self) -> int | None:
        """Moves the next audit forward if a layer may overflow earlier.

        The audit moves halfway to the predicted overflow.

        Returns:
            Int. Steps from the last audit to the next, or `None` if the audit
            does not move.
        """
        found = self.forecast.steps_left().values()
        left = min((steps for steps, _ in found), default=math.inf)
        if self._last + left >= self._next or self._hurries >= _HURRIES:
            return None
        steps = max(int(left / 2), 1)
        self._next = self._last + steps
        self._hurries += 1
        return steps

    def found(self, examination):
        """Records the result of a diagnosis.

        Args:
            examination: `Examination`.
        """
        self.errors = examination.errors
        self.scale_use_known = True
        kinds = {finding.verdict.kind for finding in examination.findings}
        self.all_repaired = kinds <= {"scale_search"}

    def leave(self, model, taken: int):
        """Records the end of a `fit`.

        Args:
            model: The `keras.Model`, with variables that are synchronized.
            taken: Int. Steps taken in this `fit`.
        """
        self.steps += taken
        self._identity = _identity(model)

    def belongs_to(self, model) -> bool:
        """Returns whether the model is unchanged since its last `fit`."""
        return self.all_repaired and self._identity == _identity(model)


def audit_schedule(model, new: bool = False) -> AuditSchedule:
    """Returns the schedule of a model, or a new one if the model has changed.

    Args:
        model: A compiled `keras.Model`, with variables that are synchronized.
        new: Boolean, whether to start a new schedule in any case. Defaults to
            `False`.
    """
    known = _SCHEDULES.get(model)
    if new or known is None or not known.belongs_to(model):
        known = _SCHEDULES[model] = AuditSchedule()
    return known


def _identity(model):
    policies = [layer.dtype_policy.name for layer in flat_layers(model)]
    small = [
        v for v in model.trainable_variables if math.prod(v.shape) <= _ELEMENTS
    ]
    read = active.step().read
    weights = [zlib.crc32(read(v).tobytes()) for v in small[:_COMPARED]]
    # Every call to `compile` creates a new loss tracker, so the loss tracker
    # identifies the call.
    return loss_tracker(model), policies, weights
