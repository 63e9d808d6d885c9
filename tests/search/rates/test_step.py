import numpy as np
import pytest

from autotune.search.rates.step import _is_worth_the_risk


@pytest.mark.parametrize(
    ("hope", "mean", "chance", "safe_gain", "is_worth_it"),
    [
        (0.12, -0.02, 0.3, 0.2, True),  # a tenth is worth it whatever else there is
        (0.04, 0.03, 0.6, 0.01, True),  # nothing safe promises much: likely to fit, expected to be faster
        (0.011, 0.01, 0.6, 0.0, True),
        (0.009, 0.01, 0.6, 0.0, False),  # next to nothing is no reason, though nothing else is left
        (0.04, 0.03, 0.6, 0.02, False),  # what is safe promises half of it
        (0.04, 0.03, 0.4, 0.01, False),  # more likely to run out than to fit
        (0.04, -0.01, 0.6, 0.01, False),  # it may be faster, and is expected to be slower
    ],
)
def test_memory_is_risked_for_a_tenth_or_where_nothing_safe_promises_as_much(hope, mean, chance, safe_gain, is_worth_it):
    found = _is_worth_the_risk(np.array([hope]), np.array([mean]), np.array([chance]), safe_gain)
    assert found.tolist() == [is_worth_it]
