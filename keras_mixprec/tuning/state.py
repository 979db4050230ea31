"""What a tuner was given, its phases in one `fit`, and what it remembers."""

import dataclasses
import enum
from collections.abc import Callable
from typing import Any

from keras_mixprec.tuning.promotion import Probation


@dataclasses.dataclass(frozen=True)
class TunerSettings:
    """The arguments of a `PrecisionTuner`, and where its plan is kept.

    Attributes:
        save_plan: Function of the `Repairs`, called after each change.
        plan: String. The file that it is written to, empty for none.
        rungs: Tuple. What is tried for a layer, as for `propose`.
        why_bfloat16: String. Why it is, half a sentence.
        held_back: `HeldBack`, or `None`.
        check_validate: Boolean. Whether it was never evaluated.
    """

    save_plan: Callable
    plan: str
    rungs: tuple
    why_bfloat16: str
    dry_run: bool
    promote_after: int
    cooldown: int
    max_demoted_fraction: float
    max_rebuilds: int
    on_limit: str
    update_freq: int
    verbose: int
    held_back: Any = None
    check_validate: bool = False
    tolerance: float = 0.0


class Phase(enum.Enum):
    """What a tuner does at present."""

    STARTING = "before the first batch"
    WATCHING = "reads the counters now and then"
    CAPTURING = "captures each batch until a step fails, which is diagnosed"
    ENDED = "has given up, and changes nothing more"


# Each phase: those that may follow.
_NEXT = {
    Phase.STARTING: {Phase.WATCHING, Phase.ENDED},
    Phase.WATCHING: {Phase.WATCHING, Phase.CAPTURING, Phase.ENDED},
    Phase.CAPTURING: {Phase.WATCHING, Phase.CAPTURING, Phase.ENDED},
    Phase.ENDED: set(),
}


@dataclasses.dataclass
class TuningState:
    """All that a tuner remembers from batch to batch.

    Attributes:
        phase: `Phase`; `enter` changes it.
        capture_until: Int. While it captures: the step at which it stops.
        next_reading: Int. The step at which the counters are read next.
        idle_until: Int. The step before which nothing is to be done.
        changed_at: Int. The step of the last change of the model, `None`
            before one.
        triggered: Boolean. Whether non-finite steps are the reason for the
            diagnosis under way.
        advised: Set of the paths that a dry run has reported.
        probation: `Probation` of the last demotions, `None` if none is due.
    """

    phase: Phase = Phase.STARTING
    capture_until: int = 0
    next_reading: int = 0
    idle_until: int = 0
    changed_at: int | None = None
    triggered: bool = False
    advised: set = dataclasses.field(default_factory=set)
    probation: Probation | None = None

    def enter(self, phase: Phase, until: int = 0) -> None:
        """Changes to another phase, unless this one is the last.

        Args:
            phase: `Phase`.
            until: Int. `capture_until`, of `CAPTURING`.
        """
        if phase in _NEXT[self.phase]:
            self.phase, self.capture_until = phase, until

    def read_by(self, step: int) -> None:
        """Reads the counters at `step` at the latest."""
        self.next_reading = min(self.next_reading, step)
        self.idle_until = min(self.idle_until, self.next_reading)

    def not_advised_before(self, wanted: dict) -> dict:
        """Returns the demotions, by path, that no dry run has reported."""
        return {p: d for p, d in wanted.items() if p not in self.advised}

    @property
    def captures(self) -> bool:
        """Whether each batch is captured."""
        return self.phase is Phase.CAPTURING

    @property
    def ended(self) -> bool:
        """Whether nothing is changed any more."""
        return self.phase is Phase.ENDED
