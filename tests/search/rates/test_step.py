from types import SimpleNamespace

import numpy as np
import pytest
from optuna.distributions import CategoricalDistribution

from autotune.search.rates.coding import Coding
from autotune.search.rates.memory import MemoryModel, Peak
from autotune.search.rates.step import CALIBRATION, Step, _expected_gains, calibration


@pytest.mark.parametrize(("mean", "spread"), [(0.1, 0.05), (-0.1, 0.05), (0.0, 0.3), (-0.3, 0.1)])
def test_expected_gain_matches_a_simulation(mean, spread):
    draws = np.random.default_rng(0).normal(mean, spread, 400_000)
    simulated = np.maximum(np.exp(draws) - 1, 0).mean()
    assert _expected_gains(np.array([mean]), np.array([spread]))[0] == pytest.approx(simulated, rel=0.02, abs=3e-6)


def test_certain_loss_has_no_expected_gain():
    assert _expected_gains(np.array([-0.2, 0.2]), np.array([0.0, 0.0])).tolist() == pytest.approx([0.0, np.expm1(0.2)])


def test_prefetching_that_ran_out_of_host_memory_does_not_rule_out_less_of_it():
    workers, prefetch = "loader.num_workers", "loader.prefetch_factor"
    coding = Coding({workers: CategoricalDistribution([8]), prefetch: CategoricalDistribution([2, 4])})
    out = Peak(params={workers: 8, prefetch: 4}, peak_bytes=None, is_out=True, is_host=True)
    step = SimpleNamespace(_memory=MemoryModel([out], capacity_bytes=1e9), _coding=coding)
    assert Step._chances_to_fit(step, coding.all_codes()).tolist() == [1.0, 0.0]


def test_a_spread_is_calibrated_by_the_number_of_changes_to_the_nearest_trial():
    tried = np.array([[0, 0, 0], [1, 1, -1]])
    codes = np.array([[0, 0, 0], [0, 0, 2], [1, 0, 1], [2, 2, 2]])
    assert calibration(codes, tried).tolist() == CALIBRATION[[0, 1, 2, 3]].tolist()
    far = calibration(np.full((1, 20), 1), np.zeros((1, 20)))
    assert far.tolist() == [CALIBRATION[-1]]  # no number of changes is beyond the table
