import numpy as np
import pytest

from autotune.search.rates.step import _expected_gains


@pytest.mark.parametrize(("mean", "spread"), [(0.1, 0.05), (-0.1, 0.05), (0.0, 0.3), (-0.3, 0.1)])
def test_expected_gain_matches_a_simulation(mean, spread):
    draws = np.random.default_rng(0).normal(mean, spread, 400_000)
    simulated = np.maximum(np.exp(draws) - 1, 0).mean()
    assert _expected_gains(np.array([mean]), np.array([spread]))[0] == pytest.approx(simulated, rel=0.02, abs=3e-6)


def test_certain_loss_has_no_expected_gain():
    assert _expected_gains(np.array([-0.2, 0.2]), np.array([0.0, 0.0])).tolist() == pytest.approx([0.0, np.expm1(0.2)])
