"""Keeps the last good states of a training run."""

import math
from collections import deque
from typing import Any, NamedTuple

from keras_mixprec.diagnosis.thresholds import DIVERGED, WORSE
from keras_mixprec.keras_internals import flat_layers
from keras_mixprec.loss_scaling.spikes import gates_of
from keras_mixprec.numerics.rehearsal import State, rates_of, size_of_state

# A state of the model is kept before the first step, and then every 64 steps.
_EVERY = 64

# The last 2 states of a model are kept in the host's memory, for models of up
# to 1 GiB.
_HELD, _MOST_BYTES = 2, 2**30


class KeptState(NamedTuple):
    """The state of a model before a step.

    Attributes:
        step: Int. The number of steps taken before the state.
        state: `State`.
        batch: The batch of the step, as `train_step` takes it.
        rates: Dict of the learning rates, as from `rates_of`.
    """

    step: int
    state: State
    batch: Any
    rates: dict


class KeptStates:
    """Keeps the last states of a model in which training was healthy.

    Attributes:
        due_at: The step at which the next state is kept, infinity for never.
        held: The last `KeptState`s, oldest first.
        growth: Float. The relative increase of the loss over the best loss, at
            the last reading. NaN if the loss was not finite.
    """

    def __init__(self):
        self.due_at = math.inf
        self.held: deque = deque(maxlen=_HELD)
        self.growth = 0.0
        self._total, self._best = (0.0, 0.0), math.inf

    def begin(self, model, step: int):
        """Plans to keep a first state before this step."""
        is_small = size_of_state(model) <= _MOST_BYTES
        self.due_at = step if is_small else math.inf

    def note(self, total: tuple | None):
        """Records the mean loss since the last call.

        Args:
            total: Tuple of the sum of losses and the sum of their weights in
                this epoch, or `None` without a loss.
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
        """Returns whether the loss is close to the best loss."""
        return self.growth <= WORSE

    @property
    def has_grown(self) -> bool:
        """Returns whether the growth of the loss suggests a divergence."""
        return not self.growth < DIVERGED

    def back_to(self, step: int | None) -> KeptState:
        """Returns the state of a step, and forgets all later states.

        The sums of losses start again from 0.

        Args:
            step: Int, or `None` for the newest state.
        """
        steps = [own.step for own in self.held]
        while step in steps and self.held[-1].step != step:
            self.held.pop()
        self.accept()
        self._total = 0.0, 0.0
        return self.held[-1]

    def accept(self):
        """Treats the next loss as the best one so far."""
        self.growth, self._best = 0.0, math.inf

    def wait(self, step: int):
        """Plans to keep the next state in 64 steps."""
        self.due_at = step + _EVERY

    def keep(self, model, step: int, batch):
        """Keeps the current state of the model.

        Args:
            model: The `keras.Model`, with variables that are up to date.
            step: Int. The number of steps taken so far.
            batch: As `train_step` takes it, or `None`.
        """
        if batch is None or not all(x.built for x in flat_layers(model)):
            return  # A model without variables has no state to keep.
        if any(gate.read().in_a_row for gate in gates_of(model)):
            return
        state = State.of(model)
        if state.is_finite:
            self.held.append(KeptState(step, state, batch, rates_of(model)))
        else:  # A growth of NaN starts a diagnosis.
            self.growth = math.nan
