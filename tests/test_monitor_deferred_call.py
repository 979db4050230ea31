"""Several may wait for the next call of a train function."""

import types

import pytest

from keras_mixprec.guards.train_function import DeferredCall


def own(data):
    return [data]


@pytest.fixture
def model():
    return types.SimpleNamespace(train_function=own)


def waiting(model):
    """Returns a `DeferredCall` that tells of itself, once."""
    call = DeferredCall()

    def train(data):
        call.disarm()
        return [call, *model.train_function(data)]

    call.arm(model, train)
    return call


def test_the_one_armed_last_goes_first(model):
    first, last = waiting(model), waiting(model)
    assert [first.armed, last.armed] == [True, True]
    assert model.train_function(1) == [last, first, 1]
    assert [first.armed, last.armed] == [False, False]
    assert model.train_function is own


def test_one_that_waits_no_more_is_passed_over(model):
    first, last = waiting(model), waiting(model)
    first.disarm()
    assert model.train_function(1) == [last, 1]
    assert model.train_function is own


def test_arming_again_takes_the_place_of_the_wait(model):
    first, last = waiting(model), waiting(model)
    first.arm(model, lambda data: [0, *last_of(first, model)(data)])
    assert model.train_function(1) == [0, last, 1]
    assert model.train_function is own


def last_of(call, model):
    call.disarm()
    return model.train_function


def test_a_recompiled_train_function_ends_the_wait(model):
    call = waiting(model)
    model.train_function = own
    assert not call.armed
    call.disarm()
    assert model.train_function is own
