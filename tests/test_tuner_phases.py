"""The phases of a tuner, and which follow which."""

import pytest

from keras_mixprec.tuning.state import Phase, TuningState


def test_it_captures_up_to_a_step():
    state = TuningState()
    state.enter(Phase.WATCHING)
    state.enter(Phase.CAPTURING, until=7)
    assert (state.captures, state.capture_until) == (True, 7)
    state.enter(Phase.WATCHING)
    assert not state.captures


def test_it_captures_nothing_before_it_has_started():
    state = TuningState()
    state.enter(Phase.CAPTURING, until=7)
    assert state.phase is Phase.STARTING


@pytest.mark.parametrize("phase", list(Phase))
def test_nothing_follows_the_end(phase):
    state = TuningState()
    state.enter(Phase.ENDED)
    state.enter(phase)
    assert state.ended
