"""The steps at which a model is audited."""

import dataclasses
import math
import weakref
import zlib
from typing import Any

from keras_mixprec.backend import active
from keras_mixprec.diagnosis.causes import Course
from keras_mixprec.keras_internals import flat_layers, loss_tracker
from keras_mixprec.monitoring.forecasts import AuditForecast

# A model is audited before its first step, after these numbers of steps, and
# then each time the number has grown fourfold. Activations grow fastest at
# first: a T5 whose norms overflow by step 16 trains for nothing until an audit
# finds the fault. Later faults that skip no step are rare.
_AUDITS = 16, 48
_AUDITS_GROW = 4

# How many audits may be brought forward. Each halves the steps that are left to
# an overflow, so eight come within a 256th of them.
_HURRIES = 8

# The number of weights that are compared, and the most elements of each, to see
# whether somebody has set them. Comparing all weights takes as long as a step.
_COMPARED, _ELEMENTS = 8, 2**14

_SCHEDULES = weakref.WeakKeyDictionary()


@dataclasses.dataclass
class AuditSchedule:
    """Says when a model is audited, and keeps the result of the last audit.

    A schedule lasts over several `fit`s. It ends if, between two of them, the
    model is compiled again, or its dtypes or weights are set.

    Attributes:
        steps: Int. Steps taken under it, up to the last `fit`.
        start: `Course` of the model at its first diagnosis, `None` before.
        errors: Dict, as in `Examination`, of the last diagnosis.
        all_repaired: Boolean, whether all that the last diagnosis found is
            repaired. If not, the next `fit` starts a new schedule.
        cost: Float. Seconds that the last diagnosis took, `None` before one.
        forecast: `AuditForecast` from the headroom at each audit.
        scale_use_known: Boolean, whether it is known how the model's step
            uses the loss scale.
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
        """Returns whether there was no audit yet."""
        return not self._audits

    @property
    def is_overhead(self) -> bool:
        """Returns whether the next audit counts as overhead."""
        return self._audits > len(_AUDITS)

    def is_comparison_due(self, taken: int, first: float) -> bool:
        """Returns whether to compare a run that is not audited with float32.

        Args:
            taken: Int. Steps taken in this `fit`.
            first: Float. Steps before the first time; then twice as many.
        """
        return self.steps + taken >= max(first, 2 * self._compared)

    def compare(self, taken: int):
        """The run is compared with float32 now.

        Args:
            taken: Int. Steps taken in this `fit`.
        """
        self._compared = self.steps + taken

    def begin(self, model):
        """Notes where training begins, the first time.

        Args:
            model: The `keras.Model`, with variables that are synchronized.
        """
        if self.start is None:
            self.start = Course.of(model, math.nan)

    def note_first_loss(self, sums: tuple | None):
        """Notes the loss of the first step, unless a better one is known.

        Args:
            sums: The sum of losses and their weights, `None` for none.
        """
        if self.start and sums and sums[1] and math.isnan(self.start.loss):
            self.start = self.start._replace(loss=sums[0] / sums[1])

    def took(self, seconds: float):
        """Notes how long a diagnosis took."""
        self.cost = seconds

    def examine_scale_use(self):
        """How the step uses the loss scale is examined now."""
        self.scale_use_known = True

    def repair(self, is_done: bool):
        """Notes whether all that was found is repaired now."""
        self.all_repaired = is_done

    def steps_left(self, taken: int) -> int:
        """Returns how many steps there are to the next audit, if any.

        Args:
            taken: Int. Steps taken in this `fit`.
        """
        return self._next - self.steps - taken

    def audit(self, taken: int):
        """An audit is made now.

        Args:
            taken: Int. Steps taken in this `fit`.
        """
        steps = self.steps + taken
        later = [date for date in _AUDITS if date > steps]
        self._next = later[0] if later else _AUDITS_GROW * steps
        self._audits += 1
        self._last = steps

    def hurry(self) -> int | None:
        """Brings the next audit forward if a layer overflows before it.

        It halves the steps that are left, each time.

        Returns:
            Int. Steps from the last audit to the next, `None` if it stays.
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
        """A diagnosis found this.

        Args:
            examination: `Examination`.
        """
        self.errors = examination.errors
        self.scale_use_known = True
        kinds = {finding.verdict.kind for finding in examination.findings}
        self.all_repaired = kinds <= {"scale_search"}

    def leave(self, model, taken: int):
        """A `fit` ends.

        Args:
            model: The `keras.Model`, with variables that are synchronized.
            taken: Int. Steps taken in it.
        """
        self.steps += taken
        self._identity = _identity(model)

    def belongs_to(self, model) -> bool:
        """Returns whether nobody has changed the model since its last `fit`."""
        return self.all_repaired and self._identity == _identity(model)


def audit_schedule(model, new: bool = False) -> AuditSchedule:
    """Returns the schedule of a model, a new one if it has changed.

    Args:
        model: A compiled `keras.Model`, with variables that are synchronized.
        new: Boolean, whether it is a new one in any case. Defaults to `False`.
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
    # Every `compile` makes a new one.
    return loss_tracker(model), policies, weights
