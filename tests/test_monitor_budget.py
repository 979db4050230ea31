"""What may be spent is a share of the time that training itself took."""

import pytest

from keras_mixprec.monitoring.overhead import OverheadBudget


@pytest.fixture
def wait(clock):
    return clock.wait


def begun(wait, max_overhead):
    budget = OverheadBudget(max_overhead)
    wait(60.0)  # Compiling.
    budget.add("diagnoses", 30.0)
    assert budget.trained == 0.0
    assert budget.left("probes") == budget.left("readings") == 0.0
    budget.begin(1)
    return budget


def test_what_happened_before_the_second_call_is_neither_here_nor_there(wait):
    budget = begun(wait, 0.0525)
    wait(100.0)
    assert budget.trained == 100.0
    # 0.0125 of the 0.0525 are for what is not timed.
    assert budget.left("probes") == pytest.approx(2.0)
    budget.begin(9)
    assert budget.trained == 100.0
    assert budget.before == 30.0  # Which the summary tells all the same.


def test_readings_and_probes_have_a_half_each(wait):
    budget = begun(wait, 0.0525)
    wait(100.0)
    assert budget.left("probes") == pytest.approx(2.0)
    budget.add("probes", 3.0)
    assert budget.left("probes") < 0.0
    assert budget.left("readings") == pytest.approx(2.0)
    budget.add("readings", 1.5)
    assert budget.left("readings") == pytest.approx(0.5)


def test_what_happens_once_is_no_overhead_and_no_training(wait):
    budget = begun(wait, 0.0525)
    wait(130.0)
    budget.add("probes", 30.0, is_overhead=False)
    assert budget.trained == pytest.approx(100.0)
    assert budget.left("probes") == pytest.approx(2.0)
    assert budget.seconds_per_step(51) == pytest.approx(2.0)


def test_all_the_time_may_be_spent(wait):
    budget = begun(wait, 0.99)
    wait(100.0)
    budget.add("probes", 99.0)
    assert budget.left("probes") < 0.0
    budget = begun(wait, 1.0)
    wait(100.0)
    budget.add("probes", 99.0)
    assert budget.left("probes") > 1e9


def test_of_small_shares_one_half_is_for_what_is_not_timed(wait):
    budget = begun(wait, 0.002)
    wait(1000.0)
    assert budget.left("probes") == pytest.approx(0.5)
    assert begun(wait, 0.0).left("probes") == 0.0


def test_a_pause_is_no_time_of_training(wait):
    budget = begun(wait, 0.0525)
    wait(40.0)
    budget.pause()
    wait(1000.0)
    budget.go_on()
    wait(60.0)
    assert budget.trained == pytest.approx(100.0)
    assert budget.seconds_per_step(51) == pytest.approx(2.0)
