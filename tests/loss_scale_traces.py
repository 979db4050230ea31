"""Overflow sequences, and the loss scales of a rule and of its peer."""

import numpy as np

from keras_mixprec.loss_scaling.rules import LossScaleState

NORMAL = 2.0**-126, float(np.finfo(np.float32).max)


def random_overflows(rng, steps, sequences):
    """Returns booleans `(steps, sequences)`, seldom to nine in ten true.

    Some come one by one, some in bursts of 4 or 16.
    """
    burst = rng.choice([1, 4, 16])
    draws = rng.random((steps // burst + 1, sequences))
    overflows = draws < np.linspace(0, 0.9, sequences)
    return np.repeat(overflows, burst, axis=0)[:steps]


def batch_of_states(rule, size):
    """Returns the initial state as arrays: the rules are elementwise."""
    return LossScaleState(*(np.full(size, x) for x in rule.initial_state()))


def trace_rule(rule, overflows):
    """Returns the scale that each step of each sequence ran with."""
    state, scales = batch_of_states(rule, overflows.shape[1]), []
    for overflow in overflows:
        scales.append(state.scale)
        state = rule.update(state, ~overflow)
    return np.stack(scales)


def trace_peer(make, overflows):
    """Returns the same for generators that `make()` starts, in float64."""
    scales = np.empty(overflows.shape)
    with np.errstate(over="ignore", under="ignore"):
        for column, sequence in enumerate(overflows.T.tolist()):
            peer = make()
            scales[0, column] = next(peer)
            scales[1:, column] = [peer.send(bad) for bad in sequence[:-1]]
    return scales


def comparable(scales, make):
    """Marks the steps at which a float32 rule can equal a peer.

    If the peer uses float32 itself, all steps are marked, on the way to 0 and
    to infinity too. If it uses Python floats, the marks end with the first
    scale that is not a normal float32 number.
    """
    if isinstance(next(make()), np.float32):
        return np.ones(scales.shape, bool)
    low, high = NORMAL
    return np.logical_and.accumulate((scales >= low) & (scales <= high))
