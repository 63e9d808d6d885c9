"""The overhead benchmark times a training loop with the harness and without it, and states intervals."""

import pytest

from tests.benchmarks import overhead


@pytest.mark.thorough
def test_harness_is_removed_completely_and_its_own_time_is_a_share_of_the_step():
    cost, control, num_calls = overhead.cost_in_one_process(1, 2, 25)  # the program fails if a function of the harness is left
    assert [len(values) for values in (cost.with_us, cost.without_us, control.with_us, cost.own_frac)] == [2, 2, 2, 2]
    assert num_calls > 0
    assert all(0.0 < share < 1.0 for share in cost.own_frac)


def test_missing_times_are_reported_with_the_output_of_the_program():
    with pytest.raises(SystemExit, match="printed no times:\\nthe harness could not be taken out"):
        overhead._printed("", "the harness could not be taken out")


def test_few_pairs_give_no_interval_and_many_do():
    few = overhead.StepCost(with_us=[3.0, 4.0], without_us=[1.0, 1.0])
    assert few.words() == "2.5 us (too few for an interval, n = 2)"
    many = overhead.StepCost(with_us=[float(n) for n in range(20)], without_us=[1.0] * 20)
    assert many.words() == "8.5 us (4.0 to 13.0, n = 20)"


def test_own_time_is_in_microseconds_however_long_a_step_takes():
    cost = overhead.StepCost(with_us=[2000.0, 2100.0, 1900.0], own_frac=[0.009, 0.008, 0.02])
    assert cost.own_us == pytest.approx(18.0)  # less than 1 % of the step, but more than 10 us
