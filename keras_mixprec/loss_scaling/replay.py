"""Which loss scale each of many steps ran with, after the fact.

An update rule is a pure function of its state and of whether a step was
finite. So the state at some step and the numbers of the skipped steps since
give every scale in between, without a look at each.
"""

from typing import NamedTuple

import numpy as np

from keras_mixprec.loss_scaling.rules import LossScale, LossScaleState


class Replayed(NamedTuple):
    """What a rule did over a stretch of steps.

    Attributes:
        changes: List of `(steps, scale)`: after so many attempted steps the
            scale became another.
        state: The `LossScaleState` at the end.
    """

    changes: list
    state: LossScaleState


def replay(
    rule: LossScale, state: LossScaleState, skipped, until: int
) -> Replayed:
    """Follows a rule over steps that have been taken.

    Args:
        rule: `LossScale`.
        state: The `LossScaleState` to begin with, of NumPy scalars.
        skipped: Numbers of the steps after that which were skipped; they count
            attempted steps from 1.
        until: Int. Number of the last step.

    Returns:
        A `Replayed`.
    """
    changes, skipped = [], {int(step) for step in skipped}
    ends = sorted(step for step in skipped if step + 1 not in skipped)
    starts = sorted(step for step in skipped if step - 1 not in skipped)
    runs = [
        (s, e) for s, e in zip(starts, ends, strict=True) if e > state.steps
    ]
    for start, end in runs:
        state = _follow(rule, state, start - 1, True, changes)
        state = _follow(rule, state, end, False, changes)
    return Replayed(changes, _follow(rule, state, until, True, changes))


def _follow(rule, state, until, finite, changes):
    """The state after steps that were all finite, or all not."""
    while (left := until - int(state.steps)) > 0:
        if unchanged := min(rule.unchanged_for(state, finite), left):
            state = state._replace(
                steps=np.int32(state.steps + unchanged),
                good_steps=np.int32(state.good_steps + unchanged * finite),
            )
            continue
        scale, state = state.scale, rule.next_state(state, finite)
        if state.scale != scale:
            changes.append((int(state.steps), float(state.scale)))
    return state
