"""States that training was in while nothing was wrong, to look back at."""

import math
from collections import deque
from typing import Any, NamedTuple

from keras_mixprec.diagnosis.thresholds import DIVERGED, WORSE
from keras_mixprec.keras_internals import flat_layers
from keras_mixprec.loss_scaling.spikes import gates_of
from keras_mixprec.numerics.rehearsal import State, rates_of, size_of_state

# A state is kept before the first step and whenever so many steps were taken.
_EVERY = 64

# The last ones that are held, in the memory of the host, up to a size.
_HELD, _MOST_BYTES = 2, 2**30


class KeptState(NamedTuple):
    """The state of a model before a step.

    Attributes:
        step: Int. Steps taken until then.
        state: `State`.
        batch: The next training batch, as `train_step` takes it.
        rates: Dict of the learning rates, as from `rates_of`.
    """

    step: int
    state: State
    batch: Any
    rates: dict


class KeptStates:
    """Keeps the states that a model was in, as long as nothing is wrong.

    Attributes:
        due_at: The step before which the next one is kept, infinite for never.
        held: The last `KeptState`s, the newest last.
        growth: Float. How far the loss was above the best one at the last
            reading, as a share of that one; NaN if it was not finite.
    """

    def __init__(self):
        self.due_at = math.inf
        self.held: deque = deque(maxlen=_HELD)
        self.growth = 0.0
        self._total, self._best = (0.0, 0.0), math.inf

    def begin(self, model, step: int):
        """Says when to keep the first one, which is before this step."""
        is_small = size_of_state(model) <= _MOST_BYTES
        self.due_at = step if is_small else math.inf

    def note(self, total: tuple | None):
        """Takes note of the loss since this was called last.

        Args:
            total: The sum of losses and their weights so far in this epoch,
                `None` without a loss.
        """
        total = total or (0.0, 0.0)
        before = self._total if self._total[1] <= total[1] else (0.0, 0.0)
        self._total = total
        if weight := total[1] - before[1]:
            loss = (total[0] - before[0]) / weight
            self._best = min(self._best, loss)
            least = max(abs(self._best), 1e-30)
            self.growth = (loss - self._best) / least

    @property
    def is_good(self) -> bool:
        """Returns whether the loss was not far above the best one."""
        return self.growth <= WORSE

    @property
    def has_grown(self) -> bool:
        """Returns whether the loss has grown as in a divergence."""
        return not self.growth < DIVERGED

    def back_to(self, step: int | None) -> KeptState:
        """Returns the state of a step, and forgets those after it.

        The sums of losses start over as well.

        Args:
            step: Int, or `None` for the newest.
        """
        steps = [own.step for own in self.held]
        while step in steps and self.held[-1].step != step:
            self.held.pop()
        self.accept()
        self._total = 0.0, 0.0
        return self.held[-1]

    def accept(self):
        """Takes a loss as large as the next one for usual."""
        self.growth, self._best = 0.0, math.inf

    def wait(self, step: int):
        """Keeps no state before the next 64 steps are over."""
        self.due_at = step + _EVERY

    def keep(self, model, step: int, batch):
        """Keeps the state that the model is in.

        Args:
            model: The `keras.Model`, with variables that are up to date.
            step: Int. Steps taken until now.
            batch: As `train_step` takes it, or `None`.
        """
        if batch is None or not all(x.built for x in flat_layers(model)):
            return  # The first step may have to build it.
        if any(gate.read().in_a_row for gate in gates_of(model)):
            return
        state = State.of(model)
        if state.is_finite:
            self.held.append(KeptState(step, state, batch, rates_of(model)))
        else:  # A reason for a diagnosis.
            self.growth = math.nan
